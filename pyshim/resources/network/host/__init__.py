"""The pod's network on the host: its namespace, the links in it, the taps beside them, its loopback addresses.

Read `pod_network.py` first. Only `child.py` and `loopback_steering.py` import pyroute2: they run in the namespace. What
`delete` and the ledger's undo use is in `rtnetlink.py`.
"""
