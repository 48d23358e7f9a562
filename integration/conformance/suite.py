"""A suite that others wrote for CRI, and what it says of each of its specs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

REGISTRY_PORT = 5000
"""Of the registry on 127.0.0.1 within the enclosure."""
REGISTRY = f"localhost:{REGISTRY_PORT}"
"""Clients of a registry of this name speak plain HTTP to it."""
PAUSE = f"{REGISTRY}/pause:3.10.2"
"""The sandbox image of the container runtime."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One spec: `status` is the suite's word, `reason` the first line of a failure."""

    name: str
    status: str
    reason: str = ""
    listed_as: tuple[str, ...]
    """The names by which the page may list it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    name: str
    """With its version."""
    run_on: Callable[[Path, str, str, str, str], list[str]]
    """The command, by the directory for reports, the socket, the handler, the focus ("" for all) and the time limit."""
    prepare: Callable[[], None]
    """Makes what the suite expects beside a container runtime that runs."""
    read: Callable[[Path], list[Spec]]
    """The specs of a run, by the directory for reports."""


LOG = "suite.log"
"""What the suite printed, in the directory for reports."""
