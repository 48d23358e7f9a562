"""Pure decisions: from spec, configuration and host facts to plans. No I/O, no clock; random values are arguments.

Plans are frozen values. They can be printed without root, and tests compare them with golden files. Read `sandbox.py`
first.
"""
