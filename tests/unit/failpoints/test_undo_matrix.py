"""The undo matrix: at each step of a pod's life an error, a hang past its deadline, a cancellation, the shim's kill -9.

After containerd's clean-up calls the machine is as it was before the pod, and the error shown names the step. The
tables of the last run, one for each kind of fault, are in .build/undo-matrix-*.txt.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.failpoints.points import Action, Fault, steps
from tests.fakes.clock import run_fast_forward
from tests.unit.failpoints.pod_life import PodLife, ServedLife

BUILD = Path(__file__).resolve().parents[3] / ".build"

# The deadline's error of each step that hangs. A step that is not listed here must not hang a call.
HANGS = {
    "config.load": "load configuration",
    "host.facts": "probe host",
    "host.capacity": "measure room on host",
    "host.read_bytes": "read '/bundles/",
    "host.source_facts": "look at '/dev/",
    "host.make_directory": "make directory '/run/",
    "host.mounted_files": "look at mounts",
    "host.boot_architectures": "read the headers of kernel and initrd",
    "host.mount": "mount '",
    "host.start_virtiofsd": "start virtiofsd '/v'",
    "host.open_streams": "open streams of '",
    "host.run_hook": "run prestart hook '/hooks/before'",
    "cgroups.occupants": "look into cgroups '",
    "cgroups.make": "make cgroups '",
    "cgroups.join": "join cgroup '",
    "cgroups.join_family": "join cgroup '",
    "cgroups.join_threads": "move threads into cgroup '",
    "cgroups.apply": "set limits of cgroup '",
    "cgroups.device_rules": "look at device nodes",
    "cgroups.pin_family": "pin process ",
    "records.open": "open state of sandbox",
    "network.connect": "connect network namespace '/run/netns/pod'",
    "hypervisor.create": "create vm 'pod'",
    "hypervisor.start": "start vm",
    "hypervisor.await_agent_device": "wait until the guest uses the agent's device",
    "hypervisor.plug": "plug device '",
    "hypervisor.resize_vcpus": "resize vm to ",
    "hypervisor.resize_memory": "resize vm to ",
    "agent.connect": "connect agent '",
    "agent.Check": "check agent",
    "agent.CreateSandbox": "create sandbox 'pod' in guest",
    "agent.UpdateInterface": "set up interface 'eth0' in guest",
    "agent.UpdateRoutes": "set routes in guest",
    "agent.AddARPNeighbors": "add neighbours in guest",
    "agent.GetGuestDetails": "get guest details",
    "agent.OnlineCPUMem": "bring cpus and memory online in guest",
    "agent.CreateContainer": "create container '",
    "agent.StartContainer": "start container '",
    "agent.ExecProcess": "run exec 'e1' in container 'app'",
    "agent.UpdateContainer": "update container 'app' in guest",
    "agent.StatsContainer": "measure container 'app' in guest",
    "agent.PauseContainer": "pause container 'app' in guest",
    "agent.ResumeContainer": "resume container 'app' in guest",
}
# The pod goes on when these fail: they end something, move bytes of a stream, save time, or only report.
SURVIVED = (
    *("agent.RemoveContainer", "agent.DestroySandbox", "agent.GetOOMEvent", "agent.CloseStdin", "agent.Read"),
    "agent.RemoveStaleVirtiofsShareMounts",
    "cgroups.hasten_moves",
    *("stdin.", "output.", "virtiofsd.stop", "hypervisor.stop", "hypervisor.unplug", "records.save", "records.remove"),
    *(
        "network.disconnect",
        "network.close_taps",
        "network.changed",
        "publisher.",
        "streams.close",
        "agent.WaitProcess",
    ),
    *("cgroups.leave", "hypervisor.vcpu_thread_ids", "ledger.release."),
)
AGAIN = ("host.", "ledger.", "agent.CreateContainer")
"""Steps of each container or resource: faulted at the first time and at the last."""


class Row(NamedTuple):
    fault: Fault
    error: str

    def __str__(self) -> str:
        return f"{self.fault.point + '#' + str(self.fault.nth):48} {self.fault.action:7} clean  {self.error or '-'}"


def reached(kind: type[PodLife] = PodLife) -> dict[str, int]:
    """Every point an undisturbed life passes, with how often."""

    async def body() -> dict[str, int]:
        life = kind()
        await life.live()
        assert life.errors == []
        await life.clean_up()
        hits = dict(life.faults.hits)
        await life.close()
        assert life.machine.left() == []
        return hits

    return run_fast_forward(body())


def faults(action: Action, kind: type[PodLife] = PodLife) -> Iterator[Fault]:
    """Each point at its first and at its last time."""
    known = steps()
    for point, count in sorted(reached(kind).items()):
        if action in known[point.partition(":")[0]].actions():
            for nth in sorted({1, count if point.startswith(AGAIN) else 1}):
                yield Fault(point, nth, action, 0)


async def outcome(fault: Fault, kind: type[PodLife] = PodLife) -> Row:
    """The life with that fault and its clean-up; raises AssertionError when something is left or unanswered."""
    before = asyncio.all_tasks()
    life = kind(fault)
    if fault.action is Action.KILL:
        living = asyncio.ensure_future(_live_and_clean_up(life))
        killed = asyncio.ensure_future(life.killed.wait())
        await asyncio.wait([living, killed], return_when=asyncio.FIRST_COMPLETED)
        assert life.at_kill is not None, f"{fault.point} is not reached"
        life.at_kill.replay()
        left = life.at_kill.left()
        for _ in range(3):
            await asyncio.sleep(0)  # a task that never began would complain about what it was to await
        for task in asyncio.all_tasks() - before - {living, killed}:
            task.cancel()
        living.cancel()
        await asyncio.gather(living, killed, return_exceptions=True)
        await life.drop()
    else:
        await _live_and_clean_up(life)
        left = life.machine.left()
        await life.close()
        left += [f"task {task.get_name()}" for task in asyncio.all_tasks() - before]
    assert not left, f"{fault.point}#{fault.nth}={fault.action}: left over: {left}"
    if fault.action is Action.KILL:
        return Row(fault, "")
    sign = HANGS.get(fault.point.partition(":")[0], "\0") if fault.action is Action.HANG else fault.point
    errors = life.errors[:1] or [error for error in life.late_errors if sign in error] or [""]
    return Row(fault, errors[0])


async def _live_and_clean_up(life: PodLife) -> None:
    await life.live()
    await life.clean_up()


def matrix(action: Action, kind: type[PodLife] = PodLife) -> list[Row]:
    """The outcome of each fault of that kind, written into its table too. Raises AssertionError naming all bad ones."""
    rows = []
    problems = []
    for fault in faults(action, kind):
        try:
            rows.append(run_fast_forward(outcome(fault, kind)))
        except (AssertionError, TimeoutError) as exc:
            problems.append(str(exc))
    assert not problems, lines(problems)
    assert rows, f"no step has the fault {action}"
    BUILD.mkdir(exist_ok=True)
    name = action if kind is PodLife else f"{kind.__name__.lower()}-{action}"
    (BUILD / f"undo-matrix-{name}.txt").write_text("\n".join(map(str, rows)) + "\n")
    return rows


def lines(texts: list[str]) -> str:
    return "\n".join(["", *texts])


def test_an_error_at_any_step_is_reported_and_leaves_nothing() -> None:
    rows = matrix(Action.ERROR)

    unnamed = [str(row) for row in rows if not _survives(row) and row.fault.point not in row.error]
    assert not unnamed, lines(unnamed)


def test_a_hang_at_any_step_ends_with_a_deadline_that_names_it_and_leaves_nothing() -> None:
    rows = matrix(Action.HANG)

    named = [row for row in rows if row.fault.point not in _OVERTAKEN]
    wrong = [str(row) for row in named if not _survives(row) and HANGS.get(_step(row), "") not in row.error]
    assert not wrong, lines(wrong)
    unlisted = [str(row) for row in named if not _survives(row) and _step(row) not in HANGS]
    assert not unlisted, lines(unlisted)
    assert set(HANGS) <= {_step(row) for row in rows}


def test_the_shims_end_at_any_step_leaves_only_what_its_ledger_names() -> None:
    matrix(Action.KILL)


def test_a_cancellation_at_any_step_leaves_nothing() -> None:
    matrix(Action.CANCEL)


@pytest.mark.parametrize("action", [Action.ERROR, Action.KILL, Action.CANCEL])
def test_a_fault_at_any_step_of_a_pod_by_the_sandbox_api_leaves_nothing(action: Action) -> None:
    matrix(action, ServedLife)


_WAITS = frozenset({"hypervisor.wait", "virtiofsd.wait"})
"""Answered when something ends: that they hang is their nature."""


_OVERTAKEN = frozenset({"agent.SignalProcess:before", "agent.SignalProcess:after"})
"""The process ends before the signal's call does: the signal was carried out, or the shim ended the process by force
after a KILL. The end answers the caller, with success."""


def _step(row: Row) -> str:
    return row.fault.point.partition(":")[0]


def _survives(row: Row) -> bool:
    is_poststop = _step(row) == "host.run_hook" and row.fault.nth > 1  # the container has gone: its failure is logged
    return is_poststop or _step(row).startswith(SURVIVED) or _step(row) in _WAITS
