"""The ends of a process's streams on the host: FIFOs, files, log programs; and reading text that is not trusted.

Read `opening.py` first.
"""
