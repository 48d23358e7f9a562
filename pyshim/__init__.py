"""pyshim: a containerd runtime shim v2 that runs every pod in its own virtual machine.

Read docs/ARCHITECTURE.md for the rooms of this package and which way imports go between them.
"""

__version__ = "0.1.0"
