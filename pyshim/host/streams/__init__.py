"""The ends of a process's streams on the host: FIFOs, files, log programs.

Read `opening.py` first.
"""
