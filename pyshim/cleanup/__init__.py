"""Undo after a crash: `delete`, what a dead shim left, orphans of the node, and the one undo of each kind of resource.

Read `undo.py` first, the undo of each kind, which `remote_vms.py` and `lost_vms.py` have for VMs of a service. Then
`leftovers.py`, which undoes a sandbox by its persisted ledger, and `names.py`, which finds its resources by their names
where the ledger is lost. `delete.py` is containerd's call, which `background.py` keeps within its seconds; `orphans.py`
is for a whole node, `ended.py` for the containers that CRI-O still has of a dead shim.
"""
