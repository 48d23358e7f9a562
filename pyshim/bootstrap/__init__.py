"""What runs in containerd's foreground: `start`, `delete`, `-info`, `-v`.

Stdlib core only, no asyncio; tests/style/test_start_imports.py holds the list for `start`. Read `start.py` first.
"""
