"""A DRA driver for the devices of remote VMs. It offers them to the scheduler and prepares claims on the node; the
cloud provides the devices.

`slices.py` makes the offer from the operator's table, `offer.py` keeps it at the API server, `claims.py` prepares
allocated devices, and `plugin.py` serves the kubelet. docs/DRA.md describes the driver for users.
"""
