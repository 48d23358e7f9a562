"""Faults on demand: for tests that ask what every step leaves behind when it fails, hangs or takes the shim with it.

A decorator of the composition root: `shim.py` is a shim whose `serve` gets the faults of the variable
PYSHIM_FAILPOINTS and wraps with them what it passes in. The product carries no marks and never imports this. Every call
through a seam has a point `before` it (nothing has happened) and one `after` it (it has happened, the caller does not
know yet). Read `points.py` first.
"""
