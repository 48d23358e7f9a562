"""A Create that fails and a VM that is lost: the error names step and reason, and nothing is left."""

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from pyshim.model.confinement import HostOom
from pyshim.model.errors import FailedPrecondition, Unavailable
from pyshim.model.ids import ContainerId
from pyshim.model.task import Status
from pyshim.model.vm import Capabilities
from pyshim.pod.health import CHECK_PAUSE_S, MAX_FAILED_CHECKS, TIMEOUT_S
from pyshim.ttrpc import Code
from tests.fakes.host import Faults
from tests.fakes.vm import FakeVm
from tests.unit.pod.conftest import PIPES, Stack, until


@pytest.mark.parametrize("step", ["create_vm", "start_vm"])
async def test_a_vmm_that_the_oom_killer_ends_at_its_start_is_reported_so(step: str) -> None:
    """Happens with a RuntimeClass without overhead: the pod's cgroup has no room for a VM."""

    stack = Stack(Faults({step: 1}))
    stack.host.cgroup_tree.killed = HostOom(limited_by="/pod1", limit_bytes=64 << 20)
    spec = {"linux": {"cgroupsPath": "/pod1/c1"}}
    try:
        with pytest.raises(FailedPrecondition, match=f"OOM killer ended the VMM, as cgroup '/pod1' .*{step}"):
            await stack.create("c1", ["sleep"], PIPES, **spec)
        assert stack.left() == {}
    finally:
        await stack.close()


@pytest.mark.parametrize("method", ["Check", "CreateSandbox", "CreateContainer"])
async def test_a_vm_that_dies_during_create_gives_its_reason(method: str, stack: Stack) -> None:
    stack.agent.hung.add(method)
    creating = asyncio.ensure_future(stack.create("c1", ["sleep"], PIPES))
    await until(lambda: method in stack.agent.calls)

    stack.hypervisors[0].die("guest panicked: no root")
    if method == "CreateContainer":  # the connection ends with the VM
        stack.clients[0].close()

    with pytest.raises(Unavailable, match="guest panicked: no root"):
        await creating
    assert stack.left() == {}


async def test_a_panic_during_boot_is_reported_even_when_virtiofsd_is_seen_to_end_first(stack: Stack) -> None:
    stack.agent.hung.add("Check")
    creating = asyncio.ensure_future(stack.create("c1", ["sleep"]))
    await until(lambda: "Check" in stack.agent.calls)

    next(iter(stack.host.daemons)).ended.set_result("virtiofsd exited 0")
    await asyncio.sleep(0.1)
    stack.hypervisors[0].die("guest panicked; last console lines: not syncing")

    with pytest.raises(Unavailable, match="guest panicked"):
        await creating


async def test_virtiofsd_that_dies_alone_is_the_reported_reason(stack: Stack) -> None:
    stack.agent.hung.add("Check")
    creating = asyncio.ensure_future(stack.create("c1", ["sleep"]))
    await until(lambda: "Check" in stack.agent.calls)

    next(iter(stack.host.daemons)).ended.set_result("virtiofsd was killed")

    with pytest.raises(Unavailable, match="virtiofsd was killed"):
        await creating


@pytest.mark.parametrize(
    ("socket", "reason"),
    [("/run/vc/vm/c1/vhost-fs.sock", "start vm 'c1': virtiofsd exited 1"), ("/other", "connect '/other'")],
)
async def test_an_end_of_virtiofsd_is_the_reason_for_a_vmm_that_misses_its_socket(
    stack: Stack, socket: str, reason: str
) -> None:
    """virtiofsd ends at once, for instance if it cannot isolate itself; then the VMM cannot connect to `socket`."""

    def hit(step: str) -> None:
        if step == "create_vm":
            next(iter(stack.host.daemons)).ended.set_result("virtiofsd exited 1")
            raise FailedPrecondition(f"connect '{socket}'")

    stack.host.faults.hit = hit  # type: ignore[method-assign]

    with pytest.raises(FailedPrecondition) as caught:
        await stack.create("c1", ["sleep"])

    assert str(caught.value) == reason


MANY_S = 20 * (CHECK_PAUSE_S + TIMEOUT_S)


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


async def test_a_healthy_guest_is_checked_repeatedly_and_not_ended(stack: Stack, container: ContainerId) -> None:
    before = checks(stack)
    await asyncio.sleep(MANY_S)

    assert MAX_FAILED_CHECKS < checks(stack) - before <= MANY_S / CHECK_PAUSE_S, (
        "it wakes a pod that rests no more often"
    )
    assert stack.pod.state(container, None).status is Status.RUNNING


@pytest.mark.parametrize("stack_kind", [Stack])
async def test_a_vm_whose_driver_reports_its_end_is_not_checked(stack: Stack, container: ContainerId) -> None:
    before = checks(stack)
    await asyncio.sleep(MANY_S)

    assert checks(stack) == before


@pytest.mark.parametrize("silent", [False, True], ids=["errors", "silence"])
async def test_a_guest_that_fails_its_checks_over_a_live_connection_is_lost(
    silent: bool, stack: Stack, container: ContainerId
) -> None:
    """A service's proxy may stay after the end of the remote VM."""

    if silent:
        stack.agent.hung.add("Check")
    else:
        stack.agent.failures["Check"] = (int(Code.UNAVAILABLE), "ttrpc: closed")

    assert (await stack.pod.wait(container, None)).status == 255
    failure = stack.records[0].snapshots[-1].failure
    assert f"the agent has failed {MAX_FAILED_CHECKS} health checks in a row: check agent" in failure


async def test_failed_checks_that_are_not_in_a_row_are_no_loss(stack: Stack, container: ContainerId) -> None:
    for _ in range(2 * MAX_FAILED_CHECKS):
        stack.agent.failures["Check"] = (int(Code.UNAVAILABLE), "busy")
        enough = checks(stack) + MAX_FAILED_CHECKS - 1
        await until(lambda enough=enough: checks(stack) >= enough, every_s=1)
        del stack.agent.failures["Check"]
        await asyncio.sleep(2 * CHECK_PAUSE_S)

    assert stack.pod.state(container, None).status is Status.RUNNING
