"""Finds the mounted cgroup hierarchies; reads, writes and moves for every version."""

import errno
import os
from collections.abc import Iterator, Mapping

import msgspec

from pyshim.host.mounts.table import mounts
from pyshim.host.os_errors import describe_os_error
from pyshim.host.processes.identity import parent
from pyshim.model.errors import FailedPrecondition

UNLIMITED_FROM = 1 << 62
"""v1 shows "no limit" as the largest page count, in bytes."""
_FULL = (errno.EAGAIN, errno.ENOMEM, errno.ENOSPC)
"""The first is cgroup.max.descendants, the others are limits of the kernel."""


class Hierarchy(msgspec.Struct, frozen=True):
    """One mounted hierarchy; `controllers` is empty for v2's."""

    mount_point: str
    controllers: tuple[str, ...]


def mounted(proc_root: str = "/proc") -> tuple[Hierarchy, ...]:
    """Every cgroup hierarchy that this process sees, once, except named ones without controllers (systemd's)."""
    known = _known_controllers(proc_root)
    found: dict[tuple[str, ...], Hierarchy] = {}
    for each in mounts(f"{proc_root}/self/mountinfo"):
        controllers = tuple(option for option in each.options if option in known) if each.kind == "cgroup" else ()
        if controllers or each.kind == "cgroup2":
            found.setdefault(controllers, Hierarchy(each.point, controllers))
    return tuple(found.values())


def _known_controllers(proc_root: str) -> frozenset[str]:
    lines = read(f"{proc_root}/cgroups").splitlines()
    return frozenset(line.split()[0] for line in lines if line.strip() and not line.startswith("#"))


def place_of(pid: int | str, controllers: tuple[str, ...], proc_root: str = "/proc") -> str:
    """The cgroup of a process from the root of the hierarchy; empty if it has ended or its cgroup is not visible."""
    return places_of(pid, proc_root).get(frozenset(controllers), "")


def places_of(pid: int | str, proc_root: str = "/proc") -> Mapping[frozenset[str], str]:
    """`place_of` for every hierarchy, by its controllers."""
    places = {}
    for line in filter(None, os.fsdecode(_content(f"{proc_root}/{pid}/cgroup")).split("\n")):
        _, names, path = line.split(":", 2)
        places[frozenset(filter(None, names.split(",")))] = "" if path.startswith("/..") else path
    return places


def read(path: str) -> str:
    """The file's text; empty when it cannot be read."""
    return _content(path).decode("ascii", "replace")


def _content(path: str) -> bytes:
    """The file's bytes; empty when it cannot be read. Unbuffered, since a pod reads a hundred such files."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.readall()
    except OSError:
        return b""


def number(path: str) -> int | None:
    """The number in the file; None if there is none, or if it stands for no limit."""
    text = read(path).strip()
    return int(text) if text.isdecimal() and int(text) < UNLIMITED_FROM else None


def keyed(path: str, key: str) -> int:
    """The value of a `key value` line; 0 without such a line."""
    for line in read(path).splitlines():
        name, _, value = line.partition(" ")
        if name == key and value.strip().isdecimal():
            return int(value)
    return 0


def write(path: str, text: str) -> None:
    """The kernel accepted `text`, by one write(2). Raises OSError."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def members(directory: str) -> tuple[int, ...]:
    return tuple(int(line) for line in read(f"{directory}/cgroup.procs").split() if line.isdecimal())


def make_directory(path: str) -> None:
    """The cgroup exists. Raises FailedPrecondition naming it."""
    try:
        os.mkdir(path, 0o755)
    except FileExistsError:
        if os.path.isdir(path):
            return
        raise FailedPrecondition(f"make cgroup {path!r}: a file of this name is there") from None
    except OSError as error:
        hint = " (hint: no more cgroups are allowed here)" if error.errno in _FULL else ""
        raise FailedPrecondition(f"make cgroup {path!r}: {describe_os_error(error)}{hint}") from error


def move(directory: str, file: str, number: int) -> None:
    """The process (`cgroup.procs`) or thread is in the cgroup, unless it has ended. Raises FailedPrecondition."""
    try:
        write(f"{directory}/{file}", str(number))
    except ProcessLookupError:
        return
    except OSError as error:
        raise FailedPrecondition(f"move {number} into cgroup {directory!r}: {describe_os_error(error)}") from error


def own_children(directory: str) -> Iterator[int]:
    """The pids of this process and its children that are in the cgroup."""
    for pid in members(directory):
        if pid == os.getpid() or parent(pid) == os.getpid():
            yield pid


def upwards(path: str) -> Iterator[str]:
    """`path` and every cgroup above it, the root as an empty text."""
    while path not in ("", "/"):
        yield path
        path = path.rpartition("/")[0]
    yield ""
