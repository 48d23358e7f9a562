"""The names of a sandbox's resources on the host: what exists under them, and which ledger entries can be its own.

`conventional_ledger` finds a sandbox whose state cannot be read: by directories, cgroups and processes. Kata's shims
use the same directories and also name their VMM `sandbox-<id>`, so a name alone proves nothing. A process is ours if
its executable is what its command line says, it runs as our user, and it lives in our pid namespace. A process in
another pid namespace belongs to a container, such as a nested node's VM. A process of another user may have any command
line: that user could make us remove what only root can remove.

`belongs_to` checks an entry of a ledger read from disk before it is undone. The state's checksum finds changes by a
disk or an editor. The check finds entries that no shim would have written, whose undo would remove, unmount or end
another sandbox's resources.
"""

import os
import posixpath
import re
from collections.abc import Callable, Collection, Set
from contextlib import suppress
from typing import NamedTuple

from pyshim.host.mounts.table import mounted_below
from pyshim.host.processes import identity as processes
from pyshim.model.errors import FailedPrecondition, InvalidArgument
from pyshim.model.ledger import LedgerEntry, ResourceKind
from pyshim.model.places import (
    CGROUP_ROOT,
    DIRECT_VOLUMES,
    METRICS_DIRECTORY,
    PROBE_NAME,
    QMP_CHARDEV,
    SHARED_ROOT,
    STATE_ROOT,
    SWAP_ROOT,
    VM_ROOT,
    VMM_NAME,
)
from pyshim.resources.cgroups.host.hierarchies import members, mounted
from pyshim.resources.network.host.rtnetlink import NETNS_ROOT, our_taps
from pyshim.resources.network.plan.network import OWN_NETNS
from pyshim.state.schema import SandboxState

ROOTS = (SHARED_ROOT, VM_ROOT, DIRECT_VOLUMES, STATE_ROOT, SWAP_ROOT)
"""Directories that the shim makes its own in: nothing below them is a link of its making."""
EMPTY_DIR_DISK = re.compile(r"/kubernetes\.io~empty-dir/[^/]+/disk\.img$")
"""The end of the path of the disk that the shim makes in an emptyDir."""
VMM_WORD = f"chardev={QMP_CHARDEV},mode=control"
"""An argument of every VMM of ours that Kata's VMMs lack; a test compares it with the builder of command lines."""
_PROGRAMS = ("qemu", "kvm", "virtiofsd", "vhost-device-vsock")
_MAX_CGROUP_DEPTH = 12
"""Levels below the root in which cgroups are looked for: the kubelet's pods are about five deep."""


class Places(NamedTuple):
    """The roots to look below; others than the real ones are for tests."""

    vm_root: str = VM_ROOT
    shared_root: str = SHARED_ROOT
    cgroup_root: str = CGROUP_ROOT
    vmm_name: str = VMM_NAME
    netns_root: str = NETNS_ROOT
    direct_volumes: str = DIRECT_VOLUMES
    metrics_root: str = METRICS_DIRECTORY


def conventional_ledger(sandbox_id: str, places: Places) -> tuple[LedgerEntry, ...]:
    """The sandbox's resources that exist now, in the form of its ledger: to be undone from the end.

    It costs a walk through all cgroups and a look into every pod's network namespace.
    """
    vm_dir, shared_dir = f"{places.vm_root}/{sandbox_id}", f"{places.shared_root}/{sandbox_id}"
    programs = _processes_of(sandbox_id, (f"{vm_dir}/", f"{shared_dir}/"), places)
    entries = [
        LedgerEntry(kind=ResourceKind.DIRECTORY, key=path) for path in (vm_dir, shared_dir) if os.path.lexists(path)
    ]
    # A namespace that the shim made outlives what is in it, so it is undone late.
    if os.path.lexists(netns := f"{places.netns_root}/{posixpath.basename(OWN_NETNS)}{sandbox_id}"):
        entries.append(LedgerEntry(kind=ResourceKind.NETNS, key=netns))
    if os.path.lexists(metrics := f"{places.metrics_root}/{sandbox_id}"):
        entries.append(LedgerEntry(kind=ResourceKind.SOCKET, key=metrics))
    entries += _cgroups_of(sandbox_id, places.cgroup_root, {program.pid for program in programs})
    entries += _links_of(sandbox_id, places.netns_root)
    # Innermost first is the order of undoing.
    entries += [LedgerEntry(kind=ResourceKind.MOUNT, key=point) for point in reversed(mounted_below(shared_dir))]
    for process in programs:
        program = processes.executable(process)
        detail: dict[str, str | int] = {"program": program, "pid": process.pid, "start_ticks": process.start_ticks}
        entries.append(LedgerEntry(kind=ResourceKind.PROCESS, key=processes.program_name(process), detail=detail))
    return tuple(entries)


def _links_of(sandbox_id: str, root: str) -> list[LedgerEntry]:
    """Taps whose names mark them as the sandbox's, and the filters that connect them with the pod's links."""
    entries = []
    for tap in our_taps(root):
        if tap.owner == sandbox_id:
            detail: dict[str, str | int] = {"netns": tap.netns, "index": tap.ifindex}
            entries.append(LedgerEntry(kind=ResourceKind.LINK, key=tap.name, detail=detail))
            if tap.link:
                entries.append(LedgerEntry(kind=ResourceKind.INGRESS, key=tap.link, detail={"netns": tap.netns}))
    return entries


def _processes_of(sandbox_id: str, words: tuple[str, ...], places: Places) -> list[processes.ProcessRef]:
    """The VMM, virtiofsd and vsock program: of those names, with the sandbox's directories, or name, as words."""
    named = {process for word in words for process in processes.find_by_argument(word)}
    found = {process for process in named if _is_known_program(process, sandbox_id, places)}
    found.update(process for name, process in named_vmms(places) if name == sandbox_id)
    return sorted(found)


def named_vmms(places: Places) -> tuple[tuple[str, processes.ProcessRef], ...]:
    """Sandbox id and process of every VMM that our builder of command lines has named."""
    found = []
    for process in processes.find_by_argument(VMM_WORD):
        words = processes.arguments(process.pid)
        name = words[words.index("-name") + 1] if "-name" in words[:-1] else ""
        sandbox_id = name.removeprefix(places.vmm_name).partition(",")[0]
        if name.startswith(places.vmm_name) and sandbox_id and _is_known_program(process, sandbox_id, places):
            found.append((sandbox_id, process))
    return tuple(found)


def _is_known_program(process: processes.ProcessRef, sandbox_id: str, places: Places) -> bool:
    name = processes.program_name(process)
    return (
        name.startswith(_PROGRAMS)
        and (
            processes.is_in_our_namespace(process)
            # The shim starts it in one of its own.
            or (name.startswith("virtiofsd") and processes.is_first_of_a_namespace_below_ours(process))
        )
        and processes.is_of_user(process, os.getuid(), *_users_of(sandbox_id, places))
    )


def _users_of(sandbox_id: str, places: Places) -> tuple[int, ...]:
    """The users of the sandbox's programs, if it has its own: the group of its directory says so.

    Source: `hypervisors/qemu/isolation.py`.
    """
    if "/" in sandbox_id:  # of a command line that anyone may have written
        return ()
    try:
        first = os.lstat(f"{places.vm_root}/{sandbox_id}").st_gid
    except OSError:
        return ()
    return (first, first + 1) if first else ()


def cgroup_names(sandbox_id: str) -> tuple[str, ...]:
    """The names that Kata and CRI-O give a sandbox's cgroup, whatever is above it."""
    return tuple(f"{prefix}{sandbox_id}" for prefix in ("kata_", "crio-", "kata_crio-"))


def _cgroups_of(sandbox_id: str, root: str, pids: Set[int]) -> list[LedgerEntry]:
    """Cgroups with the names that Kata, CRI-O and systemd give a sandbox's, and those named by its id.

    Another runtime's container may have the same id. So one named by the id counts where every process in it is one of
    `pids`, the sandbox's programs, or a child of one: virtiofsd serves from a child in a pid namespace of its own.
    """
    scopes = (f"{owner}-{sandbox_id}.scope" for owner in ("cri-containerd", "crio", "kata-overhead"))
    names = {*cgroup_names(sandbox_id), *scopes}
    found = []
    for directory, below, _ in os.walk(root, followlinks=False):
        for name in below:
            path = f"{directory}/{name}"
            in_katas_parent = os.path.basename(directory) in _PARENTS
            if name in names or (name == sandbox_id and (in_katas_parent or _holds_only(path, pids))):
                found.append(LedgerEntry(kind=ResourceKind.CGROUP, key=path))
        if directory.count("/") - root.count("/") >= _MAX_CGROUP_DEPTH:
            below.clear()
    return found


def _holds_only(cgroup: str, pids: Set[int]) -> bool:
    found = {pid for directory, _, _ in os.walk(cgroup) for pid in members(directory)}
    # A process that is ending, such as a VMM after SIGKILL, has lost its command line and cannot be identified.
    found = {pid for pid in found if processes.arguments(pid)}
    return all(processes.parent(pid) in pids for pid in found - pids)


_PARENTS = frozenset({"kata_overhead", "kata_sandboxed_pod"})


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
