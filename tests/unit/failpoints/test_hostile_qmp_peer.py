"""A QEMU that lies, in every mode of `tests/fakes/hostile_qmp.py`, against the whole shim on the fake machine.

The driver and its monitor are the real ones; the process and its answers are those of `tests/fakes/scripted_qemu.py`.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hypervisors.qemu import disks
from tests.fakes.hostile_qmp import MODES, value
from tests.fakes.scripted_qemu import Answers, ScriptedQemu
from tests.unit.failpoints.hostile import assert_survived
from tests.unit.failpoints.pod_life import PodLife, ServedLife


@pytest.fixture(autouse=True)
def disks_opened_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in a thread, for which the clock of these tests leaves no time."""

    async def at_once(work: Callable[..., object], *given: object) -> object:
        return work(*given)

    monkeypatch.setattr(disks, "in_own_thread", at_once)


def life_on(answers: Answers, directory: Path, kind: type[PodLife] = PodLife) -> PodLife:
    return kind(vm=lambda ledger, machine: ScriptedQemu(ledger, machine, answers, directory))


async def test_an_honest_qemu_serves_the_whole_life(tmp_path: Path, fast_clock: None) -> None:
    life = life_on(Answers(), tmp_path)
    await life.live()
    assert life.errors == []
    await life.end()

    assert life.machine.left() == []
    await life.close()


@pytest.mark.parametrize("thread", [os.getpid(), 1], ids=["its own", "another's"])
async def test_no_thread_but_those_of_qemu_is_moved_into_the_pods_cgroup(
    tmp_path: Path, thread: int, fast_clock: None
) -> None:
    """Processes in the cgroup are killed at the pod's end."""

    answers = Answers()
    answers["query-cpus-fast"] = value([{"cpu-index": 0, "thread-id": thread}])
    life = life_on(answers, tmp_path)
    await life.start()
    moved = {tid for tids in life.host.cgroup_tree.threads.values() for tid in tids}
    await life.end()

    assert moved == {thread} & {os.getpid()}
    await life.close()


@pytest.mark.parametrize("from_the_start", [True, False], ids=["from the start", "once the pod runs"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "kind", [PodLife, pytest.param(ServedLife, marks=pytest.mark.slow)], ids=["Task API", "Sandbox API"]
)
def test_a_qemu_that_lies_keeps_neither_its_pod_nor_the_host(
    tmp_path: Path, kind: type[PodLife], mode: str, from_the_start: bool
) -> None:
    answers = Answers()

    def spoil(_life: PodLife) -> None:
        answers.lie = MODES[mode]

    assert_survived(lambda: life_on(answers, tmp_path, kind), spoil, from_the_start=from_the_start)
