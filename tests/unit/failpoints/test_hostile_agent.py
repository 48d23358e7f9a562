"""A guest that lies, in every mode of `tests/fakes/hostile_agent.py`, against the whole shim on the fake machine.

Each pod is made by containerd's Task API or by its Sandbox API, and its VM has booted or continues from a template.
"""

from collections.abc import Callable

import pytest

from tests.fakes.hostile_agent import MODES, HostileAgent
from tests.unit.failpoints.hostile import assert_survived
from tests.unit.failpoints.pod_life import PodLife, ServedLife

TEMPLATE = "/run/vc/vm/template/0123"
PODS: dict[str, Callable[[], PodLife]] = {
    "Task API": lambda: PodLife(agent=HostileAgent()),
    "Sandbox API": lambda: ServedLife(agent=HostileAgent()),
    "Task API, from a template": lambda: PodLife(agent=HostileAgent(), template=TEMPLATE),
    "Sandbox API, from a template": lambda: ServedLife(agent=HostileAgent(), template=TEMPLATE),
}
MORE = [each for each in PODS if each != "Task API"]


@pytest.mark.parametrize("pod", PODS)
async def test_an_honest_guest_serves_the_whole_life_of_each_pod(pod: str, fast_clock: None) -> None:
    """The control: so much is lived through, and the clones are clones."""
    life = PODS[pod]()
    await life.live()
    assert life.errors == []
    (state,) = life.machine.disk.values()
    await life.end()

    assert state.snapshot
    assert state.snapshot.origin.startswith("cloned") is ("template" in pod)
    assert life.machine.left() == []
    await life.close()


@pytest.mark.parametrize("from_the_start", [True, False], ids=["from the start", "once the pod runs"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "pod", [pytest.param(each, marks=pytest.mark.slow) if each != "Task API" else each for each in PODS]
)
def test_a_guest_that_lies_keeps_neither_its_pod_nor_the_host(pod: str, mode: str, from_the_start: bool) -> None:
    def spoil(life: PodLife) -> None:
        assert isinstance(life.agent, HostileAgent)
        life.agent.mode = MODES[mode]

    assert_survived(PODS[pod], spoil, from_the_start=from_the_start)
