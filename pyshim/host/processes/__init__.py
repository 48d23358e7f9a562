"""Processes on the host: children started and reaped, others identified and killed, the zygote's callers examined.

Read `children.py` first; `identity.py` and `launch.py` are import-light.
"""
