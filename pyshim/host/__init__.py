"""All contact with Linux: mounts, children, FIFOs, files, netlink, probes. The only room with syscalls.

Blocking calls are offered as async methods that pick a thread or non-blocking themselves. Read `linux.py` first, which
is what orchestration sees, then `release.py`, which holds the one undo of each kind of ledger entry.
"""
