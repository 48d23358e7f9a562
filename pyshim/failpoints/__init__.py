"""Faults on demand: for tests that ask what every step leaves behind when it fails, hangs or takes the shim with it.

A decorator of the composition root. Product code carries no marks: `serve.py` wraps what it passes in, and only when
the variable PYSHIM_FAILPOINTS is set as the daemon starts; otherwise this room is not even imported. Every call through
a seam has a point `before` it (nothing has happened) and one `after` it (it has happened, the caller does not know
yet). Read `points.py` first.
"""
