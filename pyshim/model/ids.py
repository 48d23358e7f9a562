"""Identifiers and paths that must not be mixed up."""

import re
from functools import lru_cache
from typing import NewType

from pyshim.model.errors import InvalidArgument

SandboxId = NewType("SandboxId", str)
ContainerId = NewType("ContainerId", str)
ExecId = NewType("ExecId", str)
HostPath = NewType("HostPath", str)
GuestPath = NewType("GuestPath", str)

MAX_ID_CHARS = 76
_ID_PATTERN = re.compile(r"[A-Za-z0-9]+(?:[._-][A-Za-z0-9]+)*")


def checked_id(text: str, what: str) -> str:
    """`text` when it is a valid containerd identifier; it is then also safe as one path component.

    Source: containerd pkg/identifiers (pattern and the limit of 76 characters).
    """
    if len(text) > MAX_ID_CHARS or not _fits(text):
        raise InvalidArgument(f"check {what} {text[:100]!r}: not a valid identifier")
    return text


@lru_cache(maxsize=64)
def _fits(text: str) -> bool:
    """A shim is asked about the same few ids again and again."""
    return _ID_PATTERN.fullmatch(text) is not None
