"""Binary multiples of a byte (IEC 80000-13)."""

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
