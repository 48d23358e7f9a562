"""The one undo of each kind of ledger entry. Every undo is idempotent: what is already gone is success.

Synchronous and import-light: the daemon runs it in a thread, `delete` in an interpreter of its own that has a few
seconds to live. Nothing here trusts that the process which made the resource finished making it.
"""

import contextlib
import os
import time
from collections.abc import Callable
from typing import TypedDict

from pyshim.host.mounts.table import unmount_all, unmount_beneath
from pyshim.host.processes import identity as processes
from pyshim.host.trees import remove_tree
from pyshim.model.errors import FailedPrecondition, ShimError
from pyshim.model.ledger import LedgerEntry, ResourceKind

TIMEOUT_S = 5.0
"""How long one undo may wait for the kernel: a process to die, a cgroup to become empty."""


class _Namespace(TypedDict):
    netns: str
    inode: int


def release(entry: LedgerEntry, *, timeout_s: float = TIMEOUT_S) -> None:
    """The resource is gone. Raises ShimError naming kind and key when it is not."""
    deadline = time.monotonic() + timeout_s
    try:
        _UNDO[entry.kind](entry, deadline)
    except OSError as error:
        cause = error.strerror or str(error)
        where = f" ({error.filename})" if error.filename and error.filename != entry.key else ""
        raise FailedPrecondition(f"release {entry.kind.value} {entry.key!r}: {cause}{where}") from error


def release_all(
    ledger: tuple[LedgerEntry, ...],
    *,
    deadline: float,
    one_timeout_s: float,
    errors: list[str],
    patient: bool = False,
) -> tuple[LedgerEntry, ...]:
    """Every entry was undone, the last first; those that could not be are returned in their order, `errors` says why.

    For whoever comes after the shim that held them: `deadline` (of the monotonic clock) is for all of them, but for
    remote VMs when `patient`: the end of one takes as long as it takes.
    """
    held: list[LedgerEntry] = []
    for entry in reversed(ledger):
        began = time.monotonic()
        left_s = min(deadline - began, one_timeout_s)
        is_awaited = patient and entry.kind is ResourceKind.REMOTE_VM
        if is_awaited:
            left_s = _remote_patience_s(entry)
        if left_s <= 0:
            errors.append(f"release {entry.kind.value} {entry.key!r}: no time left")
            held.append(entry)
            continue
        try:
            release(entry, timeout_s=left_s)
        except Exception as error:
            # Whatever an entry that makes no sense meets: those before it must still be undone.
            told = isinstance(error, ShimError)
            errors.append(str(error) if told else f"release {entry.kind.value} {entry.key!r}: {error!r}")
            held.append(entry)
        if is_awaited:
            deadline += time.monotonic() - began
    return tuple(reversed(held))


def _release_directory(entry: LedgerEntry, _deadline: float) -> None:
    remove_tree(entry.key)


def _release_socket(entry: LedgerEntry, _deadline: float) -> None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        os.unlink(entry.key)


def _release_mount(entry: LedgerEntry, _deadline: float) -> None:
    beneath = entry.detail.get("beneath")
    if isinstance(beneath, str) and beneath:
        unmount_beneath(beneath, entry.key)
    else:
        unmount_all(entry.key)


def _release_process(entry: LedgerEntry, deadline: float) -> None:
    pid, ticks = entry.detail.get("pid"), entry.detail.get("start_ticks")
    if isinstance(pid, int) and isinstance(ticks, int):
        found: tuple[processes.ProcessRef, ...] = (processes.ProcessRef(pid, ticks),)
    else:
        # The maker died between starting it and writing the pid down.
        program = entry.detail.get("program")
        found = processes.find_by_argument(entry.key)
        if isinstance(program, str):
            found = tuple(process for process in found if processes.runs(process, program))
    for process in found:
        processes.kill_family(process, deadline)


def _release_cgroup(entry: LedgerEntry, deadline: float) -> None:
    from pyshim.host.cgroups.removal import remove_cgroup

    # With roots the key is a path in each of these hierarchies, without it is a directory.
    for root in str(entry.detail.get("roots", "")).split(":"):
        remove_cgroup(root + entry.key, deadline)


def _namespace_of(entry: LedgerEntry) -> "_Namespace":
    inode = entry.detail.get("netns_inode")
    return {"netns": str(entry.detail.get("netns", "")), "inode": inode if isinstance(inode, int) else 0}


def _release_link(entry: LedgerEntry, _deadline: float) -> None:
    from pyshim.host.network.link_removal import delete_link

    delete_link(entry.key, **_namespace_of(entry))


def _release_ingress(entry: LedgerEntry, _deadline: float) -> None:
    from pyshim.host.network.link_removal import delete_ingress

    delete_ingress(entry.key, **_namespace_of(entry))


def _release_qdisc(entry: LedgerEntry, _deadline: float) -> None:
    from pyshim.host.network.link_removal import delete_qdisc

    delete_qdisc(entry.key, **_namespace_of(entry))


def _release_netns(entry: LedgerEntry, deadline: float) -> None:
    unmount_all(entry.key)
    _release_socket(entry, deadline)


def _release_vfio(entry: LedgerEntry, _deadline: float) -> None:
    from pyshim.host.vfio import rebind

    rebind(entry.key, str(entry.detail.get("driver", "")), str(entry.detail.get("override", "")))


def _release_remote_vm(entry: LedgerEntry, deadline: float) -> None:
    from pyshim.host.remote_vms import stop_remote_vm

    stop_remote_vm(entry, deadline)


def _remote_patience_s(entry: LedgerEntry) -> float:
    from pyshim.host.remote_vms import patience_s

    return patience_s(entry)


_UNDO: dict[ResourceKind, Callable[[LedgerEntry, float], None]] = {
    ResourceKind.DIRECTORY: _release_directory,
    ResourceKind.SOCKET: _release_socket,
    ResourceKind.MOUNT: _release_mount,
    ResourceKind.PROCESS: _release_process,
    ResourceKind.CGROUP: _release_cgroup,
    ResourceKind.LINK: _release_link,
    ResourceKind.INGRESS: _release_ingress,
    ResourceKind.QDISC: _release_qdisc,
    ResourceKind.NETNS: _release_netns,
    ResourceKind.REMOTE_VM: _release_remote_vm,
    ResourceKind.VFIO: _release_vfio,
}
