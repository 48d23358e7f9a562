"""VMs whose end is not reported: the guest's agent is asked, and its silence or its errors end the sandbox."""

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from pyshim.model.ids import ContainerId
from pyshim.model.task import Status
from pyshim.model.vm import Capabilities
from pyshim.pod.health import EVERY_S, MISSES, TIMEOUT_S
from pyshim.ttrpc import Code
from tests.fakes.vm import FakeVm

from .conftest import Stack, until

MANY_S = 20 * (EVERY_S + TIMEOUT_S)


class SilentVm(FakeVm):
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities(), reports_end=False)


class SilentStack(Stack):
    def _hypervisor(self, ledger: Any, _name: str) -> FakeVm:
        self.hypervisors.append(SilentVm(self.host.faults.hit, ledger))
        return self.hypervisors[-1]


def checks(stack: Stack) -> int:
    return stack.agent.calls.count("Check")


@pytest.fixture
def stack_kind() -> type[Stack]:
    return SilentStack


@pytest.fixture
def container(stack: Stack, runner: asyncio.Runner) -> ContainerId:
    return runner.run(stack.run("c1", ["sleep"]))


async def test_a_healthy_guest_is_asked_again_and_again_and_left_alone(stack: Stack, container: ContainerId) -> None:
    before = checks(stack)
    await asyncio.sleep(MANY_S)

    assert MISSES < checks(stack) - before <= MANY_S / EVERY_S, "it wakes a pod that rests no more often"
    assert stack.pod.state(container, None).status is Status.RUNNING


@pytest.mark.parametrize("stack_kind", [Stack])
async def test_a_vm_that_tells_its_end_is_not_asked(stack: Stack, container: ContainerId) -> None:
    before = checks(stack)
    await asyncio.sleep(MANY_S)

    assert checks(stack) == before


@pytest.mark.parametrize("silent", [False, True], ids=["errors", "silence"])
async def test_a_guest_that_is_gone_behind_a_living_connection_is_lost(
    silent: bool, stack: Stack, container: ContainerId
) -> None:
    """A service's proxy may stay when the remote VM has ended."""

    if silent:
        stack.agent.hung.add("Check")
    else:
        stack.agent.failures["Check"] = (int(Code.UNAVAILABLE), "ttrpc: closed")

    assert (await stack.pod.wait(container, None)).status == 255
    failure = stack.records[0].snapshots[-1].failure
    assert f"the agent has failed {MISSES} health checks in a row: check agent" in failure


async def test_checks_that_fail_now_and_then_are_no_loss(stack: Stack, container: ContainerId) -> None:
    for _ in range(2 * MISSES):
        stack.agent.failures["Check"] = (int(Code.UNAVAILABLE), "busy")
        enough = checks(stack) + MISSES - 1
        await until(lambda enough=enough: checks(stack) >= enough, every_s=1)
        del stack.agent.failures["Check"]
        await asyncio.sleep(2 * EVERY_S)

    assert stack.pod.state(container, None).status is Status.RUNNING
