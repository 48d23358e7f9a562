"""A guest that lies, in every mode of `tests/fakes/hostile_agent.py`, against the whole shim on the fake machine."""

import pytest

from tests.fakes.hostile_agent import MODES, HostileAgent
from tests.unit.failpoints.hostile import assert_survived
from tests.unit.failpoints.pod_life import PodLife


@pytest.mark.parametrize("from_the_start", [True, False], ids=["from the start", "once the pod runs"])
@pytest.mark.parametrize("mode", MODES)
def test_a_guest_that_lies_keeps_neither_its_pod_nor_the_host(mode: str, from_the_start: bool) -> None:
    def spoil(life: PodLife) -> None:
        assert isinstance(life.agent, HostileAgent)
        life.agent.mode = MODES[mode]

    assert_survived(lambda: PodLife(agent=HostileAgent()), spoil, from_the_start=from_the_start)
