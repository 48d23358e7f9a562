"""`python -m tests.failpoints`: every failpoint there is, one a line."""

from tests.failpoints.points import points

print("\n".join(points()))
