"""Processes on the host: children started and reaped, others identified and killed; what the zygote asks of callers.

Read `children.py` first; `identity.py` and `launch.py` are import-light.
"""
