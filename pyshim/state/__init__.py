"""The persisted state of a sandbox: schema (Kata's key names), atomic store, ledger.

Read `records.py` first: a sandbox's state and ledger, as its shim writes them. Others read them by `store.py`.
"""
