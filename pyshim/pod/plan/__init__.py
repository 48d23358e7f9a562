"""Pure decisions: (spec, configuration, host facts) -> plans. No I/O, no clock, no randomness that is not passed in.

Plans are frozen values: printable without root, compared with golden files, logged once. Read `sandbox.py` first.
"""
