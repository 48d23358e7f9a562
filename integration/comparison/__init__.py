"""What a process sees in a container with pyshim and with runc, compared.

`probe.py` runs inside and prints facts, `allowed.py` is the table of the differences that are right, with the reason of
each; docs/DIFFERENCES.md is printed from it. `integration/test_differences.py` runs both.
"""
