"""pyshim: a containerd runtime shim v2 that runs every pod in its own virtual machine.

Read docs/ARCHITECTURE.md for the rooms of this package and which way imports go between them.
"""

__version__ = "0.3.0.dev0"
"""The one place: pyproject.toml reads it (docs/RELEASES.md)."""
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
"""The supported versions of CPython: the locked dependencies have wheels for them, and the unit tests run on each.

The one list, for the installer, `scripts/check --pythons`, the payload of an image and the workflow.
"""
