"""A shim speaks no TLS, and does without OpenSSL: 2 MiB of memory, and a twentieth of the time to its first answer.

Two of its libraries import `ssl` for those who do. asyncio works in an interpreter that was built without; qemu.qmp
wants one name of it, for annotations. What does speak TLS (gRPC in the child that finds devices, the forwarder in the
guest) is a process of its own.
"""

import sys
from types import ModuleType
from typing import NoReturn


class _NoTls(ModuleType):
    class SSLContext:
        """For annotations."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"use 'ssl.{name}': a shim has no TLS, see pyshim/without_tls.py")


def leave_out_tls() -> None:
    """asyncio is imported, without `ssl`, and nobody gets that from an import any more. To be called first of all."""
    sys.modules["ssl"] = None  # type: ignore[assignment]  # how Python is told that there is no such module
    import asyncio  # noqa: F401

    sys.modules["ssl"] = _NoTls("ssl")
