"""Undo after a crash: `delete`, what a dead shim left, orphans of the node, and the one undo of each kind of resource.

Read `release.py` first, then `leftovers.py`, which undoes by the persisted ledger, and `names.py`, which finds
by names where the ledger is lost.
"""
