"""What runs in containerd's foreground: `start`, `delete`, `-info`, `-v`.

Stdlib core only, no asyncio; tests/style/test_start_imports.py holds the list for `start`. Read `start.py` first. What
`start` runs has `posix` instead of `os`, which the bare interpreter does not load: a tenth of what it takes to begin.
"""
