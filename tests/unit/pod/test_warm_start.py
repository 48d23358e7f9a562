"""A pod whose VM continues from a template, and one whose template turns out to be no good."""

import pytest

from pyshim.model.ids import ContainerId
from pyshim.model.vm import LocalVm
from tests.unit.pod.conftest import DOCUMENT, Stack

WARM = {**DOCUMENT, "factory": {"enable_template": True}}
TEMPLATE = "/run/vc/vm/template/0123"


async def end(stack: Stack) -> None:
    container_id = ContainerId("c1")
    await stack.pod.kill(container_id, None, 9, False)
    await stack.pod.wait(container_id, None)
    await stack.delete_last(container_id)


def booted_after_a_clone(stack: Stack) -> LocalVm:
    """The configuration of the VM that has booted after a clone failed, of which nothing is left."""
    clone, vm = stack.hypervisors
    assert not clone.is_running
    assert clone.config is None or clone.config.saved_machine == TEMPLATE
    assert vm.config is not None
    assert (vm.config.saved_machine, vm.plugged) == ("", {})
    return vm.config


async def test_a_vm_continues_and_gets_the_pods_devices_before_the_sandbox_is_made(stack: Stack) -> None:
    stack.document, stack.host.template = WARM, TEMPLATE

    await stack.run("c1", ["sleep"])

    (vm,) = stack.hypervisors
    assert vm.config is not None
    assert vm.config.saved_machine == TEMPLATE
    assert vm.config.nics == ()
    assert list(vm.plugged) == ["share0"]
    first = stack.agent.calls[: stack.agent.calls.index("CreateSandbox")]
    assert first == ["Check", "ReseedRandomDev", "SetGuestDateTime"]
    assert [len(seed) for seed in stack.agent.seeds] == [512]
    assert stack.agent.times_ns == [1_700_000_000_000_000_000]
    assert stack.host.monitors[0].pod.observe().is_cloned
    await end(stack)
    assert stack.records[0].snapshots[-1].origin == "cloned from 0123"


LARGE = {"linux": {"resources": {"memory": {"limit": 1000 << 20}, "cpu": {"quota": 200_000, "period": 100_000}}}}


async def test_a_vm_grows_to_the_size_of_its_pod_before_the_sandbox_is_made(stack: Stack) -> None:
    stack.document, stack.host.template = WARM, TEMPLATE

    await stack.run("c1", ["sleep"], **LARGE)

    (vm,) = stack.hypervisors
    assert vm.config is not None
    assert vm.config.cpu.boot_vcpus == 1
    assert vm.vcpus == 3
    assert vm.memory_mib == vm.config.memory.boot_mib + 8 * 128
    assert stack.agent.calls.index("OnlineCPUMem") < stack.agent.calls.index("CreateSandbox")
    observed = stack.host.monitors[0].pod.observe()
    assert (observed.vcpus.current, observed.memory_mib.current) == (3, vm.memory_mib)
    await end(stack)


async def test_a_vm_that_does_not_grow_is_replaced_by_one_that_boots_with_its_size(stack: Stack) -> None:
    stack.document, stack.host.template = WARM, TEMPLATE
    stack.host.faults.plan({"resize_memory": 1})

    await stack.run("c1", ["sleep"], **LARGE)

    config = booted_after_a_clone(stack)
    assert config.cpu.boot_vcpus == 3
    observed = stack.host.monitors[0].pod.observe()
    assert (observed.vcpus.current, observed.memory_mib.current) == (3, config.memory.boot_mib)
    assert stack.host.template == TEMPLATE
    await end(stack)


async def test_without_a_template_for_its_machine_a_vm_boots(stack: Stack) -> None:
    stack.document = WARM

    await stack.run("c1", ["sleep"])

    (vm,) = stack.hypervisors
    assert vm.config is not None
    assert (vm.config.saved_machine, vm.plugged) == ("", {})
    assert "ReseedRandomDev" not in stack.agent.calls
    assert not stack.host.monitors[0].pod.observe().is_cloned
    assert stack.host.templates_asked_for == ["test.toml"]
    await end(stack)


async def test_a_template_that_cannot_be_made_is_a_warning(stack: Stack, caplog: pytest.LogCaptureFixture) -> None:
    stack.document = WARM
    stack.host.faults.plan({"make_template": 1})

    await stack.run("c1", ["sleep"])

    assert "no template made" in caplog.text
    await end(stack)


async def test_no_template_is_made_for_a_pod_whose_annotations_change_the_machine(stack: Stack) -> None:
    stack.document = WARM
    stack.annotated = {"default_memory": "io.katacontainers.config.hypervisor.default_memory"}

    await stack.run("c1", ["sleep"])

    assert stack.host.templates_asked_for == []
    await end(stack)


@pytest.mark.parametrize("step", ["create_vm", "start_vm", "connect"])
async def test_a_failure_before_the_guest_answers_discards_the_template_and_boots(step: str, stack: Stack) -> None:
    stack.document, stack.host.template = WARM, TEMPLATE
    stack.host.faults.plan({step: 1})

    await stack.run("c1", ["sleep"])

    booted_after_a_clone(stack)
    assert stack.host.template is None
    assert stack.agent.calls.count("CreateSandbox") == 1
    assert len(stack.host.daemons) == 1
    await end(stack)


async def test_a_failure_after_the_guest_has_answered_boots_and_keeps_the_template(stack: Stack) -> None:
    stack.document, stack.host.template = WARM, TEMPLATE
    stack.host.faults.plan({"plug": 1})

    await stack.run("c1", ["sleep"])

    booted_after_a_clone(stack)
    assert stack.host.template == TEMPLATE
    assert stack.agent.calls.count("CreateSandbox") == 1
    assert len(stack.host.daemons) == 1
    await end(stack)


async def test_a_vm_that_boots_after_a_failed_clone_has_its_own_size_and_places(stack: Stack) -> None:
    stack.document, stack.host.template = WARM, TEMPLATE
    stack.networks.links = ("eth0", "eth1")
    stack.host.faults.plan({"plug": 3})  # the share and the first interface are plugged, the second is not

    namespaces = [{"type": "network", "path": "/run/netns/n1"}]
    await stack.run("c1", ["sleep"], linux={"namespaces": namespaces, **LARGE["linux"]})

    config = booted_after_a_clone(stack)
    assert len(config.nics) == 2
    observed = stack.host.monitors[0].pod.observe()
    assert (observed.vcpus.current, observed.memory_mib.current) == (3, config.memory.boot_mib)
    assert [each.devicePath for each in stack.agent.interfaces] == ["", ""]
    await end(stack)


@pytest.mark.parametrize("method", ["Check", "ReseedRandomDev", "SetGuestDateTime"])
async def test_a_guest_that_does_not_answer_is_replaced_by_one_that_boots(method: str, stack: Stack) -> None:
    stack.document, stack.host.template = WARM, TEMPLATE
    stack.agent.failures[method] = (13, "no")
    stack.host.on_discard = stack.agent.failures.clear

    await stack.run("c1", ["sleep"])

    assert stack.host.template is None
    await end(stack)


@pytest.mark.parametrize("method", ["UpdateInterface", "CreateSandbox"])
async def test_a_clone_whose_guest_finds_a_plugged_device_late_is_given_up(method: str, stack: Stack) -> None:
    stack.document, stack.host.template = WARM, TEMPLATE
    stack.networks.links = ("eth0",)
    stack.agent.failures[method] = (13, "can't find device")
    stack.on_connected = lambda: len(stack.hypervisors) > 1 and stack.agent.failures.clear()

    await stack.run("c1", ["sleep"], linux={"namespaces": [{"type": "network", "path": "/run/netns/n1"}]})

    booted_after_a_clone(stack)
    assert stack.host.template == TEMPLATE
    assert len(stack.host.monitors) == 1
    await end(stack)
    assert stack.left() == {}
