"""`python -m pyshim.failpoints`: every failpoint there is, one a line."""

from pyshim.failpoints.points import points

print("\n".join(points()))
