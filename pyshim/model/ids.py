"""Distinct types for identifiers and paths, so that mypy finds where one stands for another."""

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
    """`text`, a valid identifier of containerd, which is also safe as a path component.

    Raises InvalidArgument naming `what` for any other. Source: containerd pkg/identifiers, pattern and length.
    """
    if len(text) > MAX_ID_CHARS or not _is_identifier(text):
        raise InvalidArgument(f"check {what} {text[:100]!r}: not a valid identifier")
    return text


@lru_cache(maxsize=64)  # each call of containerd has one of the same few ids
def _is_identifier(text: str) -> bool:
    return _ID_PATTERN.fullmatch(text) is not None
