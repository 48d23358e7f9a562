"""Type, numbers and mode of a device node of this machine, with which a spec is completed where it is used."""

import os
import stat
from typing import NamedTuple

from .errors import InjectionFailed, os_cause


class HostNode(NamedTuple):
    type: str
    """`b`, `c` or `p`."""
    major: int
    minor: int
    file_mode: int


def host_node(path: str) -> HostNode:
    """The node at `path`, a link not followed. Raises InjectionFailed when it is missing or something else."""
    try:
        found = os.lstat(path)
    except (OSError, ValueError) as error:
        cause = os_cause(error) if isinstance(error, OSError) else str(error)
        raise InjectionFailed(f"look at device node '{path}': {cause}") from error
    kinds = {stat.S_IFBLK: "b", stat.S_IFCHR: "c", stat.S_IFIFO: "p"}
    kind = kinds.get(stat.S_IFMT(found.st_mode))
    if kind is None:
        raise InjectionFailed(f"look at device node '{path}': it is neither a device nor a fifo")
    numbers = (0, 0) if kind == "p" else (os.major(found.st_rdev), os.minor(found.st_rdev))
    return HostNode(kind, *numbers, stat.S_IMODE(found.st_mode))
