"""Where the streams of a process lead on the host: FIFOs, files, log programs; and reading text that is not trusted.

Read `opening.py` first.
"""
