"""Where the streams of a process lead on the host: FIFOs, files, log programs; and reading what nobody trusts.

Read `opening.py` first.
"""
