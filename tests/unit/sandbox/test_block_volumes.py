"""Block devices of a container: plugged into the VM before the guest hears of them, gone with the container."""

import asyncio
from typing import Any

import pytest

from pyshim.model.errors import FailedPrecondition, ShimError, Unimplemented
from tests.unit.sandbox.conftest import Stack, scenario, until

DISK = {"path": "/dev/loop7", "type": "b", "major": 7, "minor": 7}
OTHER = {"path": "/dev/loop8", "type": "b", "major": 7, "minor": 8}


def test_a_device_is_plugged_and_told_to_the_guest_and_unplugged_with_its_container(pod_annotations: Any) -> None:
    @scenario
    async def body(stack: Stack) -> None:
        await stack.run("c1", ["sleep"], annotations=pod_annotations["sandbox"])
        app = await stack.run(
            "app", ["exit", "0"], annotations=pod_annotations["container"], linux={"devices": [DISK, OTHER]}
        )
        vm = stack.hypervisors[0]
        assert [device.path for device in vm.plugged.values()] == ["/dev/loop7", "/dev/loop8"]
        told = stack.agent.containers["app"].devices
        assert [(d.id, d.type, d.container_path) for d in told] == [
            ("0:0", "scsi", "/dev/loop7"),
            ("0:1", "scsi", "/dev/loop8"),
        ]

        await stack.pod.wait(app, None)
        await stack.pod.delete(app, None)

        assert vm.plugged == {}
        assert vm.is_running

    body()


@scenario
async def test_a_machine_that_takes_no_devices_says_so(stack: Stack) -> None:
    stack.block_hotplug = False

    with pytest.raises(Unimplemented, match="plug '/dev/loop7'"):
        await stack.create("c1", ["sleep"], linux={"devices": [DISK]})

    assert stack.left() == {}


@pytest.mark.parametrize("method", ["plug", "CreateContainer"])
def test_what_was_plugged_is_unplugged_when_create_fails(method: str, pod_annotations: Any) -> None:
    @scenario
    async def body(stack: Stack) -> None:
        await stack.run("c1", ["sleep"], annotations=pod_annotations["sandbox"])
        if method == "plug":
            stack.host.faults.plan({"plug": 2})
        else:
            stack.agent.failures[method] = (13, "no")

        with pytest.raises(ShimError if method != "plug" else FailedPrecondition):
            await stack.create(
                "app", ["sleep"], annotations=pod_annotations["container"], linux={"devices": [DISK, OTHER]}
            )

        assert stack.hypervisors[0].plugged == {}

    body()


def test_a_guest_that_keeps_a_device_does_not_hold_delete(pod_annotations: Any) -> None:
    @scenario
    async def body(stack: Stack) -> None:
        await stack.run("c1", ["sleep"], annotations=pod_annotations["sandbox"])
        app = await stack.run("app", ["exit", "0"], annotations=pod_annotations["container"], linux={"devices": [DISK]})
        await stack.pod.wait(app, None)
        vm = stack.hypervisors[0]
        vm.may_unplug.clear()
        loop = asyncio.get_running_loop()
        began = loop.time()

        await stack.pod.delete(app, None)

        assert loop.time() - began < 10
        assert vm.plugged
        vm.may_unplug.set()
        await until(lambda: not vm.plugged)

    body()


@scenario
async def test_devices_of_a_lost_vm_are_no_obstacle(stack: Stack) -> None:
    container = await stack.run("c1", ["sleep"], linux={"devices": [DISK]})
    stack.hypervisors[0].plugged.clear()  # as a VMM does that has died
    stack.hypervisors[0].die("killed")
    await stack.pod.wait(container, None)

    assert (await stack.pod.delete(container, None))[1].status == 255
    assert stack.left() == {}
