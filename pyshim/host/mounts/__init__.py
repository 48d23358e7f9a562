"""Mounts on the host: made beneath roots a guest could have planted links in, listed, and taken away.

Read `mounting.py` first; `options.py` is pure; `table.py` is import-light: `delete` uses it.
"""
