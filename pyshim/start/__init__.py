"""The calls that a container runtime waits for: `start`, `delete`, `-info`, `-v`.

`start` has the standard library and this room, no asyncio, and stays within twice the time of the bare interpreter
(`stdlib.py`, tests/style/test_start_imports.py). Read `start.py` first.
"""
