"""Where the time of Create and Start goes on the stand-ins: the phases of the shim's own trace, its CPU time, and two
floors measured in between: a move of a process into another cgroup, and the start of the stand-in for QEMU.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench import stub_pods
from bench.measures import PYKATA, Ground, bare_interpreter_s, cpu_s
from integration.framework.processes import cpu_ticks
from pyshim.host.cgroups.hierarchies import mounted, place_of
from pyshim.model.trace import Span

_MS = 1000.0
_KERNEL_RESTS_S = 0.2
"""Moves that follow each other closely share what the first one waits for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Medians, in milliseconds."""

    pods: int
    wall_ms: float
    own_ms: float
    """without the time in which the shim only waited for the stand-in for QEMU, see `stub_pods.waited_s`"""
    cpu_ms: float
    """of all the shim's threads"""
    system_share: float
    """How much of that was the kernel's part."""
    phases: Mapping[str, tuple[float, float]]
    """When each began after the call, and how long it took, by begin. Some lie within others or overlap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    executed: Profile
    forked: Profile
    move_ms: float
    vmm_ms: float
    interpreter_ms: float


def profile(ground: Ground, pods: int) -> Found:
    """`pods` pods one after the other by executed shims, as many by forked ones; `ground` has the stand-ins."""
    floors: dict[str, list[float]] = defaultdict(list)

    def between() -> None:
        floors["move"].append(_move_s())
        floors["vmm"].append(_vmm_s(ground.directory / "stubs" / "qemu-system-stub"))
        floors["interpreter"].append(bare_interpreter_s())

    executed = _profile(ground, pods, between)
    with ground.zygote():
        forked = _profile(ground, pods, between)
    move_ms, vmm_ms, interpreter_ms = (median(floors[name]) * _MS for name in ("move", "vmm", "interpreter"))
    return Found(executed=executed, forked=forked, move_ms=move_ms, vmm_ms=vmm_ms, interpreter_ms=interpreter_ms)


def as_text(found: Found) -> str:
    lines = []
    for name, each in (("executed", found.executed), ("forked", found.forked)):
        lines.append(
            f"{name} shim: Create and Start {each.wall_ms:.1f} ms, without the wait for "
            f"the stand-in for QEMU {each.own_ms:.1f} ms; its CPU time {each.cpu_ms:.1f} ms, "
            f"{each.system_share:.0%} of it in the kernel ({each.pods} pods)"
        )
        lines += [f"  {phase:26} from {begin:6.1f} for {took:6.1f} ms" for phase, (begin, took) in each.phases.items()]
    lines.append(f"a process moved into another cgroup: {found.move_ms:.1f} ms")
    lines.append(f"start of the stand-in for QEMU, up to its greeting: {found.vmm_ms:.1f} ms")
    lines.append(f"bare interpreter: {found.interpreter_ms:.1f} ms")
    return "\n".join(lines)


def phases_of(traces: list[tuple[Span, ...]]) -> dict[str, tuple[float, float]]:
    """Medians of begin and duration by phase, from the begin of each trace; a phase that has not ended is left out."""
    seen: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for spans in traces:
        for span in spans:
            if span.end_ns:
                # Calls have the container's name in theirs: `create stub7`.
                name = span.name if span.parent >= 0 else span.name.split()[0]
                begin_ms = (span.start_ns - spans[0].start_ns) / 1e6
                seen[name].append((begin_ms, (span.end_ns - span.start_ns) / 1e6))
    medians = {name: (median(b for b, _ in times), median(t for _, t in times)) for name, times in seen.items()}
    return dict(sorted(medians.items(), key=lambda item: item[1]))


def _profile(ground: Ground, pods: int, between: Callable[[], None]) -> Profile:
    walls, owns, cpus, traces = [], [], [], []
    user_ticks = system_ticks = 0
    for _ in range(pods):
        between()
        with stub_pods.started_shim(ground) as shim:
            stub_pods.warm(shim)
            (daemon,) = PYKATA.shims(shim.container)
            before, (user, system) = cpu_s(daemon.pid), cpu_ticks(daemon.pid)
            (wall_s,) = shim.together(lambda shim=shim: stub_pods.create_and_start(shim, ground.config))  # type: ignore[misc]
            cpus.append(cpu_s(daemon.pid) - before)
            after = cpu_ticks(daemon.pid)
            walls.append(float(wall_s))
            user_ticks, system_ticks = user_ticks + after[0] - user, system_ticks + after[1] - system
            traces.append(stub_pods.trace_of(shim))
            owns.append(walls[-1] - stub_pods.waited_s(traces[-1]))
    return Profile(
        pods=pods,
        wall_ms=median(walls) * _MS,
        own_ms=median(owns) * _MS,
        cpu_ms=median(cpus) * _MS,
        system_share=system_ticks / max(1, user_ticks + system_ticks),
        phases=phases_of([trace for trace in traces if trace]),
    )


def _move_s() -> float:
    """A sleeping process is moved into a new cgroup of the first hierarchy there is."""
    hierarchy = mounted()[0]
    parent = f"{hierarchy.mount_point}{place_of('self', hierarchy.controllers)}"
    directory = Path(parent, f"bench-move-{os.getpid()}")
    directory.mkdir()
    sleeper = subprocess.Popen(["/bin/sleep", "100"])
    try:
        time.sleep(_KERNEL_RESTS_S)
        fd = os.open(directory / "cgroup.procs", os.O_WRONLY)
        try:
            started = time.monotonic()
            os.write(fd, str(sleeper.pid).encode())
            return time.monotonic() - started
        finally:
            os.close(fd)
    finally:
        sleeper.send_signal(signal.SIGKILL)
        sleeper.wait()
        directory.rmdir()


def _vmm_s(program: Path) -> float:
    """The stand-in for QEMU has been spawned and has greeted whoever waited at its control socket."""
    path = program.parent / "floor.sock"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(str(path))
        try:
            listener.listen(1)
            client.connect(str(path))
            fd = listener.fileno()
            words = [f"socket,id={name},fd={fd}" for name in ("qmp0", "agent0")]
            started = time.monotonic()
            process = subprocess.Popen([program, *words], stdin=subprocess.DEVNULL, pass_fds=(fd,))
            client.recv(4096)
            took_s = time.monotonic() - started
            client.close()
            process.kill()
            process.wait()
            return took_s
        finally:
            path.unlink()
