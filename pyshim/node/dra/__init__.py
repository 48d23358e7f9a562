"""A DRA driver for the devices of remote VMs: offered to the scheduler, prepared on the node, allocated by the cloud.

`slices.py` makes the offer from the operator's table, `offer.py` keeps it at the API server, `claims.py` prepares what
was allocated, and `plugin.py` is the kubelet's side. docs/DRA.md says what a user sees.
"""
