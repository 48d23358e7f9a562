"""The data types that all other rooms share: frozen structs, enums and protocols.

Pure: no I/O, no asyncio, no protobuf, and no import of another room. Read first: `task.py` (containerd's requests),
`plans.py` (the plans of sandbox and container) and `ledger.py` (the host resources to be undone).
"""
