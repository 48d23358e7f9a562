"""The one undo of each kind of ledger entry. Every undo is idempotent: what is already gone is success.

Synchronous and with few imports: the daemon runs it in a thread, `delete` in an interpreter that has a few seconds.
The process that made a resource may have died before the resource was complete, so each undo also accepts
a half-made resource.
"""

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable
from typing import TypedDict

from pyshim.cleanup.names import EMPTY_DIR_DISK, ROOTS
from pyshim.cleanup.remote_vms import patience_s, stop_remote_vm
from pyshim.host.files import parent_of, remove_tree
from pyshim.host.mounts.table import unmount_all, unmount_beneath
from pyshim.host.processes import identity as processes
from pyshim.model.errors import FailedPrecondition, ShimError
from pyshim.model.ledger import LedgerEntry, ResourceKind
from pyshim.resources.cgroups.host.removal import remove_cgroup
from pyshim.resources.devices.host.vfio import rebind
from pyshim.resources.network.host.rtnetlink import delete_ingress, delete_link, delete_qdisc

TIMEOUT_S = 5.0
"""Seconds that one undo may wait for the kernel: for a process to die, for a cgroup to become empty."""


class _LinkLocation(TypedDict):
    netns: str
    inode: int
    index: int


def undo_entry(entry: LedgerEntry, *, timeout_s: float = TIMEOUT_S) -> None:
    """The resource is gone. Raises ShimError naming kind and key when it is not."""
    deadline = time.monotonic() + timeout_s
    try:
        _UNDO[entry.kind](entry, deadline)
    except OSError as error:
        cause = error.strerror or str(error)
        where = f" ({error.filename})" if error.filename and error.filename != entry.key else ""
        raise FailedPrecondition(f"release {entry.kind.value} {entry.key!r}: {cause}{where}") from error


def undo_entries(
    ledger: tuple[LedgerEntry, ...],
    *,
    deadline: float,
    one_timeout_s: float = TIMEOUT_S,
    errors: list[str],
    check: Callable[[LedgerEntry], None],
) -> tuple[LedgerEntry, ...]:
    """Every entry was undone, the last first; those that could not be are returned in their order, `errors` says why.

    For a ledger whose shim is gone. `check` raises ShimError for an entry that must be left alone. `deadline` (of the
    monotonic clock) is for all of them but remote VMs: the end of one takes as long as it takes.
    """
    left: list[LedgerEntry] = []
    for entry in reversed(ledger):
        began = time.monotonic()
        left_s = min(deadline - began, one_timeout_s)
        is_awaited = entry.kind is ResourceKind.REMOTE_VM
        if is_awaited:
            left_s = patience_s(entry)
        if left_s <= 0:
            errors.append(f"release {entry.kind.value} {entry.key!r}: no time left")
            left.append(entry)
            continue
        try:
            check(entry)
            undo_entry(entry, timeout_s=left_s)
        except Exception as error:
            # Whatever the error: the entries before this one must still be undone.
            is_named = isinstance(error, ShimError)
            errors.append(str(error) if is_named else f"release {entry.kind.value} {entry.key!r}: {error!r}")
            left.append(entry)
        if is_awaited:
            deadline += time.monotonic() - began
    return tuple(reversed(left))


def _root_of(path: str) -> str:
    """The directory of the node that the path is opened beneath; a link may stand there, but nowhere below."""
    if found := EMPTY_DIR_DISK.search(path):
        return path[: found.start()] or "/"
    return next((root for root in ROOTS if path.startswith(f"{root}/")), "/")


def _undo_directory(entry: LedgerEntry, _deadline: float) -> None:
    remove_tree(entry.key, root=_root_of(entry.key))


def _undo_socket(entry: LedgerEntry, _deadline: float) -> None:
    _unlink(entry.key, stat.S_ISSOCK, "not a socket")


def _undo_file(entry: LedgerEntry, _deadline: float) -> None:
    _unlink(entry.key, stat.S_ISREG, "not a regular file")


def _unlink(path: str, is_kind: Callable[[int], bool], problem: str) -> None:
    """The path does not exist. Raises OSError if another kind of file is there, which the shim did not make."""
    name = os.path.basename(path)
    with parent_of(path, _root_of(path)) as above_fd, contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if above_fd is None:
            return
        if not is_kind(os.stat(name, dir_fd=above_fd, follow_symlinks=False).st_mode):
            raise OSError(errno.EINVAL, problem, path)
        os.unlink(name, dir_fd=above_fd)


def _undo_mount(entry: LedgerEntry, _deadline: float) -> None:
    beneath = entry.detail.get("beneath")
    if isinstance(beneath, str) and beneath:
        unmount_beneath(beneath, entry.key)
    elif root := next((root for root in ROOTS if entry.key.startswith(f"{root}/")), ""):
        unmount_beneath(root, entry.key)
    else:
        unmount_all(entry.key)


def _undo_process(entry: LedgerEntry, deadline: float) -> None:
    pid, ticks = entry.detail.get("pid"), entry.detail.get("start_ticks")
    program = entry.detail.get("program")
    if not isinstance(program, str) or not program:
        raise FailedPrecondition(f"release process {entry.key!r}: the entry names no program")
    if isinstance(pid, int) and isinstance(ticks, int):
        # A program that is a wrapper has become another one by now, with the same arguments.
        known = processes.ProcessRef(pid, ticks)
        if processes.is_alive(known) and (processes.runs(known, program) or _has_argument(known, entry.key)):
            processes.kill_family(known, deadline)
        return
    # The shim died between starting it and writing the pid down.
    for process in processes.find_by_argument(entry.key):
        if processes.runs(process, program):
            processes.kill_family(process, deadline)


def _has_argument(process: processes.ProcessRef, text: str) -> bool:
    return any(text in word for word in processes.arguments(process.pid))


def _undo_cgroup(entry: LedgerEntry, deadline: float) -> None:
    # With roots the key is a path in each of these hierarchies, without it is a directory.
    for root in str(entry.detail.get("roots", "")).split(":"):
        remove_cgroup(root + entry.key, deadline)


def _location_of(entry: LedgerEntry) -> _LinkLocation:
    inode, index = entry.detail.get("netns_inode"), entry.detail.get("index")
    return {
        "netns": str(entry.detail.get("netns", "")),
        "inode": inode if isinstance(inode, int) else 0,
        "index": index if isinstance(index, int) else 0,
    }


def _undo_link(entry: LedgerEntry, _deadline: float) -> None:
    delete_link(entry.key, **_location_of(entry))


def _undo_ingress(entry: LedgerEntry, _deadline: float) -> None:
    delete_ingress(entry.key, **_location_of(entry))


def _undo_qdisc(entry: LedgerEntry, _deadline: float) -> None:
    delete_qdisc(entry.key, **_location_of(entry))


def _undo_netns(entry: LedgerEntry, deadline: float) -> None:
    unmount_all(entry.key)
    _undo_file(entry, deadline)


def _undo_vfio(entry: LedgerEntry, _deadline: float) -> None:
    rebind(entry.key, str(entry.detail.get("driver", "")), str(entry.detail.get("override", "")))


_UNDO: dict[ResourceKind, Callable[[LedgerEntry, float], None]] = {
    ResourceKind.DIRECTORY: _undo_directory,
    ResourceKind.SOCKET: _undo_socket,
    ResourceKind.FILE: _undo_file,
    ResourceKind.MOUNT: _undo_mount,
    ResourceKind.PROCESS: _undo_process,
    ResourceKind.CGROUP: _undo_cgroup,
    ResourceKind.LINK: _undo_link,
    ResourceKind.INGRESS: _undo_ingress,
    ResourceKind.QDISC: _undo_qdisc,
    ResourceKind.NETNS: _undo_netns,
    ResourceKind.REMOTE_VM: stop_remote_vm,
    ResourceKind.VFIO: _undo_vfio,
}
