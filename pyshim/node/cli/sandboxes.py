"""All sandboxes of this node, read from their states, and what their processes use now."""

import errno
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import psutil
from msgspec import Struct
from msgspec.structs import replace

from pyshim.host.processes.identity import ProcessRef, arguments, is_alive, our_pid_namespace
from pyshim.host.processes.stat import is_stopped
from pyshim.model.caller import pod_of
from pyshim.model.errors import NotFound, ShimError
from pyshim.model.ledger import ResourceKind
from pyshim.model.sizing import SizingRecord
from pyshim.model.snapshot import SandboxSnapshot, SandboxStatus
from pyshim.model.trace import spans_from_json
from pyshim.model.units import MIB
from pyshim.node.install.plan import release_of
from pyshim.state.errors import NotOurState
from pyshim.state.schema import SandboxState
from pyshim.state.store import StateStore

RUNS = "runs"
"""The health of a sandbox whose processes run, before its shim is asked."""
STOPPED = "stopped"
"""The health of a sandbox that has ended and is not removed yet."""


class SandboxRow(Struct, frozen=True, kw_only=True):
    """One line of `pyshim list`. Sizes are 0 where none is recorded."""

    id: str
    pod: str = ""
    """NAMESPACE/NAME; empty for a sandbox outside Kubernetes."""
    containers: int = 0
    started_ns: int = 0
    """When its Create began, since the epoch; 0: not known."""
    requested_vcpus: float = 0
    requested_memory_mib: float = 0
    """The sum of its containers' requests."""
    vcpus: int = 0
    memory_mib: int = 0
    """The VM's own size."""
    release: str = ""
    """The installed release whose code its shim runs; empty for a checkout's, and when it is not known."""
    origin: str = ""
    """How its guest came to run; empty: not known."""
    health: str
    """RUNS, or the problem; `ok` once the guest's agent has answered."""
    agent_age_s: float | None = None
    """Since the agent's last answer; None: it was not asked, or never answered."""
    processes: tuple[ProcessRef, ...] = ()
    """Shim, VMM, file server: those that live."""


class Usage(Struct, frozen=True, kw_only=True):
    cpu_percent: float
    """Of one CPU."""
    memory_mib: int
    """Proportional: memory that processes share, such as guest RAM, counts once."""


def sandboxes(state_dir: str, *, prefix: str = "") -> list[SandboxRow]:
    """Every recorded sandbox, by id; those that begin with `prefix` only. Raises PermissionError without the right."""
    store = StateStore(root=state_dir)
    found = []
    for sandbox_id in sorted(store.sandbox_ids()):
        if sandbox_id.startswith(prefix):
            try:
                found.append(described(store.load(sandbox_id)))
            except NotFound:
                continue  # it ended meanwhile
            except NotOurState:
                found.append(SandboxRow(id=sandbox_id, health="another runtime's"))
            except ShimError as error:
                found.append(SandboxRow(id=sandbox_id, health=f"state damaged: {error}"))
    return found


def described(state: SandboxState) -> SandboxRow:
    snapshot = state.snapshot
    ours = state.shim.pid_namespace in (0, our_pid_namespace())
    known = {"shim": ProcessRef(state.shim.pid, state.shim.start_ticks), **_servers(state)}
    living = {name: process for name, process in known.items() if ours and is_alive(process)}
    health = _health(snapshot, known, living) if ours else "not known: its processes are in another pid namespace"
    release = release_of(next(iter(arguments(living["shim"].pid)), "")) if "shim" in living else ""
    row = SandboxRow(id=state.sandbox_id, release=release, health=health, processes=tuple(living.values()))
    if snapshot is None:
        return row
    asked_vcpus = asked_mib = 0.0
    vcpus = memory_mib = 0
    if snapshot.sizing:
        try:
            record = SizingRecord.from_json(snapshot.sizing, f"sizing record of '{state.sandbox_id}'")
        except ShimError as error:
            health = f"state damaged: {error}"
        else:
            asked_vcpus, asked_mib = float(record.vcpus.requested), float(record.memory_mib.requested)
            vcpus, memory_mib = record.vcpus.granted, record.memory_mib.granted
    return replace(
        row,
        pod=_pod_name(snapshot),
        containers=len(snapshot.containers),
        started_ns=_started_ns(snapshot),
        requested_vcpus=asked_vcpus,
        requested_memory_mib=asked_mib,
        vcpus=vcpus,
        memory_mib=memory_mib,
        origin=snapshot.origin,
        health=health,
    )


def _servers(state: SandboxState) -> dict[str, ProcessRef]:
    """The processes in the ledger, by program name."""
    found = {}
    for entry in state.ledger:
        pid, ticks = entry.detail.get("pid"), entry.detail.get("start_ticks")
        if entry.kind is ResourceKind.PROCESS and isinstance(pid, int) and isinstance(ticks, int) and pid > 0:
            found[os.path.basename(str(entry.detail.get("program", ""))) or entry.key] = ProcessRef(pid, ticks)
    return found


def _health(snapshot: SandboxSnapshot | None, known: Mapping[str, ProcessRef], living: Mapping[str, ProcessRef]) -> str:
    if snapshot is not None and snapshot.failure:
        return f"failed: {snapshot.failure}"
    if "shim" not in living:
        return "its shim is gone (hint: pyshim cleanup)"
    if stopped := [name for name, process in living.items() if is_stopped(process.pid)]:
        return f"{', '.join(stopped)} is stopped (SIGSTOP or a debugger)"
    if snapshot is None or snapshot.status is SandboxStatus.CREATING:
        return "starting"
    if snapshot.status is SandboxStatus.STOPPED:
        return STOPPED
    if gone := [name for name in known if name not in living]:
        return f"{', '.join(gone)} is gone"
    return RUNS


def _pod_name(snapshot: SandboxSnapshot) -> str:
    if snapshot.pod:
        return snapshot.pod
    for container in snapshot.containers:
        pod = pod_of(container.annotations)
        if pod.name:
            return f"{pod.namespace}/{pod.name}"
    return ""


def _started_ns(snapshot: SandboxSnapshot) -> int:
    try:
        spans = spans_from_json(snapshot.trace)
    except ValueError:
        return 0
    return spans[0].start_ns if spans else 0


class UsageMeter:
    """Measures CPU use between two looks, and memory at the second one."""

    def __init__(self) -> None:
        self._before: dict[ProcessRef, float] = {}
        self._at_s = 0.0

    def look(self, found: Sequence[SandboxRow]) -> dict[str, Usage]:
        """By sandbox id. CPU is that since the last look, so the first one finds none."""
        now_s = time.monotonic()
        elapsed_s = now_s - self._at_s
        now: dict[ProcessRef, float] = {}
        usage = {}
        for sandbox in found:
            used_s, memory_bytes = 0.0, 0
            for process in sandbox.processes:
                try:
                    looked = psutil.Process(process.pid)
                    times = looked.cpu_times()
                    memory_bytes += _memory_bytes(looked)
                except psutil.Error:
                    continue  # it has ended
                now[process] = times.user + times.system
                used_s += max(now[process] - self._before.get(process, now[process]), 0.0)
            percent = 100 * used_s / elapsed_s if self._before and elapsed_s > 0 else 0.0
            usage[sandbox.id] = Usage(cpu_percent=round(percent, 1), memory_mib=memory_bytes >> 20)
        self._before, self._at_s = now, now_s
        return usage


def _memory_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except psutil.AccessDenied:
        return int(process.memory_info().rss)


def host_side_mib_of(sandbox: SandboxRow) -> float:
    """MiB that its processes take beside guest RAM; a page that processes share counts once among them.

    Raises PermissionError without the right to look, NotFound when one of them has ended.
    """
    total_bytes = 0
    for process in sandbox.processes:
        try:
            mappings = psutil.Process(process.pid).memory_maps(grouped=False)
        except psutil.NoSuchProcess as error:
            raise NotFound(f"measure process {process.pid} of '{sandbox.id}': it has ended") from error
        except psutil.AccessDenied as error:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), f"/proc/{process.pid}/smaps") from error
        total_bytes += sum(each.pss for each in mappings if not _is_guest_ram(each, sandbox.memory_mib))
    return total_bytes / MIB


def _is_guest_ram(mapping: Any, vm_mib: int) -> bool:
    """Guest RAM is a memfd, whose name the kernel shows; if not shared, an anonymous mapping of exactly the VM's size.

    A larger anonymous mapping has the code that QEMU translates when it emulates.
    """
    if mapping.path.startswith("/memfd:"):
        return True
    return mapping.path in ("", "[anon]") and vm_mib > 0 and mapping.size == vm_mib << 20


HEADINGS = ("ID", "POD", "AGE", "CONTAINERS", "ASKED", "VM", "START", "CPU", "MEMORY", "AGENT", "HEALTH")
NUMBERS = ("AGE", "CONTAINERS", "ASKED", "VM", "CPU", "MEMORY", "AGENT")
_SHORT_ID = 13
"""Characters of an id on a terminal. Every verb accepts the beginning of an id."""


def row(sandbox: SandboxRow, usage: Usage, *, now_ns: int, whole_ids: bool) -> tuple[str, ...]:
    return (
        sandbox.id if whole_ids else sandbox.id[:_SHORT_ID],
        sandbox.pod or "-",
        age_text((now_ns - sandbox.started_ns) // 10**9) if sandbox.started_ns else "-",
        str(sandbox.containers),
        f"{sandbox.requested_vcpus:g} / {sandbox.requested_memory_mib:.0f}Mi" if sandbox.vcpus else "-",
        f"{sandbox.vcpus} / {sandbox.memory_mib}Mi" if sandbox.vcpus else "-",
        "clone" if sandbox.origin.startswith("cloned") else "boot" if sandbox.origin else "-",
        f"{usage.cpu_percent:.1f}%" if sandbox.processes else "-",
        f"{usage.memory_mib}Mi" if sandbox.processes else "-",
        "-" if sandbox.agent_age_s is None else age_text(int(sandbox.agent_age_s)),
        sandbox.health,
    )


def document(sandbox: SandboxRow, usage: Usage, *, now_ns: int) -> dict[str, object]:
    """The row for programs."""
    return {
        "id": sandbox.id,
        "pod": sandbox.pod,
        "containers": sandbox.containers,
        "age_s": max(now_ns - sandbox.started_ns, 0) // 10**9 if sandbox.started_ns else None,
        "requested": {"vcpus": sandbox.requested_vcpus, "memory_mib": sandbox.requested_memory_mib},
        "vm": {"vcpus": sandbox.vcpus, "memory_mib": sandbox.memory_mib},
        "release": sandbox.release,
        "origin": sandbox.origin,
        "used": {"cpu_percent": usage.cpu_percent, "memory_mib": usage.memory_mib},
        "agent_age_s": sandbox.agent_age_s,
        "health": sandbox.health,
    }


def age_text(seconds: int) -> str:
    """As kubectl shows ages, with one unit: `42s`, `7m`, `3h`, `12d`."""
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds // size}{unit}"
    return f"{max(seconds, 0)}s"
