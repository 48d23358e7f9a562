"""Checks that an entry of a ledger read from disk can be its sandbox's, before anything is undone.

The state's checksum finds changes by a disk or an editor. This finds entries that no shim would have written,
whose undo would remove, unmount or end another sandbox's resources.
"""

import os
import posixpath
import re
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import NamedTuple

from pyshim.cleanup.conventions import EMPTY_DIR_DISK, PROBE_NAME, Places, cgroup_names
from pyshim.host.processes import identity as processes
from pyshim.model.errors import FailedPrecondition, InvalidArgument
from pyshim.model.ledger import LedgerEntry, ResourceKind
from pyshim.resources.cgroups.host.hierarchies import mounted
from pyshim.state.schema import SandboxState

_MAX_LINK_CHARS = 15
"""IFNAMSIZ without its zero byte."""
_PCI_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_PART = re.compile("[/,=:]")
"""Between the parts of a word of a command line: paths, and options with their values."""


class _Belongings(NamedTuple):
    id: str
    container_ids: frozenset[str]
    own: tuple[str, ...]
    """The directories that belong to this sandbox only."""
    places: Places
    proc_root: str


def belongs_to(
    sandbox_id: str,
    places: Places,
    state_root: str,
    *,
    container_ids: Collection[str] = (),
    proc_root: str = "/proc",
) -> Callable[[LedgerEntry], None]:
    """A check that returns for an entry that can be the sandbox's, and raises FailedPrecondition for any other.

    `container_ids` are its containers, besides the one of its own name: each has a bundle, a directory of its name.
    """
    own = tuple(
        f"{root}/{sandbox_id}" for root in (places.vm_root, places.shared_root, state_root, places.metrics_root)
    )
    sandbox = _Belongings(sandbox_id, frozenset((sandbox_id, *container_ids)), own, places, proc_root)

    def check(entry: LedgerEntry) -> None:
        if problem := _problem(entry, sandbox):
            raise FailedPrecondition(f"release {entry.kind.value} {entry.key!r}: {problem}, so it is left alone")

    return check


def containers_of(sandbox_id: str, places: Places, state: SandboxState | None) -> frozenset[str]:
    """The containers of the state, and those under creation, which only the share has a directory of."""
    with suppress(OSError):
        shared = os.listdir(f"{places.shared_root}/{sandbox_id}/mounts")
        return _known(state) | frozenset(shared)
    return _known(state)


def _known(state: SandboxState | None) -> frozenset[str]:
    if state is None or state.snapshot is None:
        return frozenset()
    return frozenset(str(each.container_id) for each in state.snapshot.containers)


def is_foreign(entry: LedgerEntry, check: Callable[[LedgerEntry], None]) -> bool:
    """The check of `belongs_to` refuses the entry, so no run undoes it."""
    try:
        check(entry)
    except FailedPrecondition:
        return True
    return False


def _problem(entry: LedgerEntry, sandbox: _Belongings) -> str:
    """The reason why the entry cannot be the sandbox's; empty when it can."""
    key = entry.key
    match entry.kind:
        case ResourceKind.VFIO:
            return "" if _PCI_ADDRESS.fullmatch(key) else "it is not a PCI address"
        case ResourceKind.LINK | ResourceKind.INGRESS | ResourceKind.QDISC:
            return "" if _is_link_name(key) else "it is not the name of an interface"
        case ResourceKind.REMOTE_VM:
            return "" if key and _is_plain(str(entry.detail.get("socket", ""))) else "it names no VM or no service"
        case ResourceKind.PROCESS:
            return _problem_of_process(entry, sandbox)
    if not _is_plain(key):
        return "it is not an absolute, normalised path"
    if any(_is_at_or_below(key, top) for top in sandbox.own):
        return ""
    match entry.kind:
        case ResourceKind.CGROUP:
            return _problem_of_cgroup(entry, sandbox)
        case ResourceKind.NETNS if key.startswith(f"{sandbox.places.netns_root}/"):
            return ""
        case ResourceKind.DIRECTORY if posixpath.basename(key) == sandbox.id:  # of its swap files
            return ""
        case ResourceKind.FILE if _is_own_file(entry, sandbox):
            return ""
        case ResourceKind.MOUNT if _bundle_name(key) in sandbox.container_ids:
            return ""
    return f"it is not a place of sandbox {sandbox.id!r}"


def _problem_of_process(entry: LedgerEntry, sandbox: _Belongings) -> str:
    """The command line of a process that was started for a sandbox contains the sandbox's id."""
    program = str(entry.detail.get("program", ""))
    if not _is_plain(program):
        return "it names no program"
    pid, ticks = entry.detail.get("pid"), entry.detail.get("start_ticks")
    try:
        found = processes.find_by_argument(entry.key) if pid is None else ()
    except InvalidArgument as error:
        return str(error)
    if isinstance(pid, int) and isinstance(ticks, int):
        found = (processes.ProcessRef(pid, ticks),)
    names = {sandbox.id, f"{sandbox.places.vmm_name}{sandbox.id}", f"{PROBE_NAME}{sandbox.id}"}
    for process in found:
        words = processes.arguments(process.pid)
        has_id = any(not names.isdisjoint(_PART.split(word)) for word in words)
        # A process that is ending loses its command line with its memory, while it still counts as alive.
        is_alive = processes.is_alive(process) and processes.executable(process)
        if not has_id and is_alive and (pid is not None or processes.runs(process, program)):
            return f"process {process.pid} does not have the id of sandbox {sandbox.id!r}"
    return ""


def _problem_of_cgroup(entry: LedgerEntry, sandbox: _Belongings) -> str:
    """One of its elements is named for the sandbox, as Kata, CRI-O and systemd do: its undo kills all that is in it."""
    roots = str(entry.detail.get("roots", "")).split(":")
    tops = [posixpath.normpath(root + entry.key) for root in roots]
    if not all(_is_below(top, (sandbox.places.cgroup_root,)) for top in tops):
        hierarchies = tuple(each.mount_point for each in mounted(sandbox.proc_root))
        if not all(_is_below(top, hierarchies) for top in tops):
            return "it is not a cgroup"
    names = (sandbox.id, *cgroup_names(sandbox.id))
    for element in entry.key.split("/"):
        if element in names or element.endswith(f"-{sandbox.id}.scope"):
            return ""
    return f"it does not have the id of sandbox {sandbox.id!r}"


def _is_own_file(entry: LedgerEntry, sandbox: _Belongings) -> bool:
    """The sandbox's mark beside a direct volume's record, or a disk of an emptyDir whose entry has the id."""
    key = entry.key
    if _is_below(key, (sandbox.places.direct_volumes,)):
        return posixpath.basename(key) == sandbox.id
    return bool(EMPTY_DIR_DISK.search(key)) and entry.detail.get("sandbox") == sandbox.id


def _bundle_name(path: str) -> str:
    """The name of the directory above the first `rootfs` of the path: the container's, for a mount in its bundle."""
    above, found, _ = f"{path}/".partition("/rootfs/")
    return posixpath.basename(above) if found else ""


def _is_at_or_below(path: str, top: str) -> bool:
    return path == top or path.startswith(f"{top}/")


def _is_below(path: str, tops: tuple[str, ...]) -> bool:
    return any(path.startswith(f"{top}/") for top in tops)


def _is_plain(path: str) -> bool:
    return path.startswith("/") and path != "/" and "\0" not in path and posixpath.normpath(path) == path


def _is_link_name(name: str) -> bool:
    return 0 < len(name) <= _MAX_LINK_CHARS and name not in (".", "..") and not re.search(r"[/\s\0]", name)
