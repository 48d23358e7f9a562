"""A pod's devices end to end on fakes: found, cold or hot plugged, given to the right container, taken back."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from pyshim.model.devices import DeviceQuestion, DeviceRequest, FoundDevice, HostFunction, PodDevices, VfioNode
from pyshim.model.errors import FailedPrecondition, NotFound, ResourceExhausted, ShimError
from pyshim.model.ids import ContainerId
from tests.unit.pod.conftest import DOCUMENT, Stack, give_up_while_it_plugs, until
from tests.unit.state.kata_shape import DEVICE_STATE, check

SANDBOX = {
    "io.kubernetes.cri.container-type": "sandbox",
    "io.kubernetes.cri.sandbox-id": "c1",
    "io.kubernetes.cri.sandbox-name": "pod",
    "io.kubernetes.cri.sandbox-namespace": "ns",
}


def member(name: str) -> dict[str, str]:
    return {**SANDBOX, "io.kubernetes.cri.container-type": "container", "io.kubernetes.cri.container-name": name}


def node(number: int) -> VfioNode:
    address = f"0000:{number:02x}:00.0"
    function = HostFunction(address=address, vendor="0x10de", device="0x1", class_code="0x030200")
    return VfioNode(path=f"/dev/vfio/{number}", functions=(function,))


def device(number: int, container: str = "") -> FoundDevice:
    request = DeviceRequest(name=f"v.com/gpu={number}", origin="device plugin", container=container)
    return FoundDevice(request=request, nodes=(node(number),), env=(f"GPU_{number}=1",))


def prepare(stack: Stack, *cold: FoundDevice, **hypervisor: Any) -> list[DeviceQuestion]:
    """The sandbox finds `cold`, a container what its spec names; every question is remembered."""
    questions: list[DeviceQuestion] = []

    async def find(question: DeviceQuestion) -> PodDevices:
        questions.append(question)
        if question.kubelet_socket:
            return PodDevices(devices=cold)
        spec = DeviceRequest(name="", origin="spec")
        return PodDevices(
            devices=tuple(
                FoundDevice(request=spec, nodes=(node(int(path.rpartition("/")[2])),)) for path in question.nodes
            )
        )

    stack.find_devices = find
    qemu: Mapping[str, Any] = {**DOCUMENT["hypervisor"]["qemu"], "cold_plug_vfio": "root-port", **hypervisor}
    stack.document = {"hypervisor": {"qemu": qemu}, "runtime": {"pod_resource_api_sock": "/run/kubelet.sock"}}
    return questions


def vfio(*numbers: int) -> dict[str, Any]:
    return {"devices": [{"path": f"/dev/vfio/{number}", "type": "c", "major": 1, "minor": 1} for number in numbers]}


def agent_saw(stack: Stack, container: str) -> tuple[dict[str, str], list[str], list[str], list[str]]:
    """(CDI annotations, options of device messages, VFIO nodes, variables of devices) of what the guest was sent."""
    request = stack.agent.containers[container]
    annotations = {key: value for key, value in request.OCI.Annotations.items() if key.startswith("cdi.k8s.io/")}
    nodes = [each.Path for each in request.OCI.Linux.Devices if each.Path.startswith("/dev/vfio")]
    variables = [text for text in request.OCI.Process.Env if text.startswith("GPU_")]
    return annotations, [option for each in request.devices for option in each.options], nodes, variables


def saved_devices(stack: Stack) -> list[tuple[Any, Any, Any]]:
    """(node, whether cold plugged, guest paths) of what the last snapshot has."""
    found: tuple[Any, ...] = stack.records[-1].snapshots[-1].devices
    for each in found:
        check(each, DEVICE_STATE)
    return [(each["ID"], each.get("ColdPlug", False), each.get("DriverOptions", {})) for each in found]


async def test_two_containers_have_disjoint_devices_by_their_names(stack: Stack) -> None:
    questions = prepare(stack, device(1, "a"), device(2, "b"), device(3, "b"))

    await stack.run("c1", ["sleep"], annotations=SANDBOX)
    await stack.run("a1", ["sleep"], annotations=member("a"))
    await stack.run("b1", ["sleep"], annotations=member("b"), linux=vfio(2, 3))
    await stack.run("n1", ["sleep"], annotations=member("none"))

    vm = stack.hypervisors[0]
    assert vm.config is not None
    assert [placed.pci_path for placed in vm.config.pci.placed] == ["1c/00", "1d/00", "1e/00"]
    assert (
        questions
        == [DeviceQuestion(pod_name="pod", pod_namespace="ns", kubelet_socket="/run/kubelet.sock")]
        + [DeviceQuestion()] * 2
    )
    assert agent_saw(stack, "a1") == ({"cdi.k8s.io/vfio1": "v.com/gpu=0"}, ["0000:01:00.0=1c/00"], [], ["GPU_1=1"])
    assert agent_saw(stack, "b1") == (
        {"cdi.k8s.io/vfio2": "v.com/gpu=1", "cdi.k8s.io/vfio3": "v.com/gpu=2"},
        ["0000:02:00.0=1d/00", "0000:03:00.0=1e/00"],
        [],
        ["GPU_2=1", "GPU_3=1"],
    )
    assert agent_saw(stack, "n1") == ({}, [], [], [])
    assert vm.plugged == {}
    assert saved_devices(stack) == [
        (f"/dev/vfio/{number}", True, {f"0000:0{number}:00.0": path})
        for number, path in ((1, "1c/00"), (2, "1d/00"), (3, "1e/00"))
    ]


async def test_the_pause_container_is_given_none(stack: Stack) -> None:
    questions = prepare(stack, device(1, "a"))

    await stack.run("c1", ["sleep"], annotations={**SANDBOX, "cdi.k8s.io/x": "v.com/gpu=1"}, linux=vfio(1))

    assert len(questions) == 1
    assert "c1" not in stack.agent.containers


async def test_foreign_annotations_do_not_reach_the_guest(stack: Stack) -> None:
    prepare(stack, device(1, "a"))
    await stack.run("c1", ["sleep"], annotations={**SANDBOX, "cdi.k8s.io/x": "host.com/only=1"})

    await stack.run("a1", ["sleep"], annotations={**member("a"), "cdi.k8s.io/x": "host.com/only=1"})

    assert agent_saw(stack, "a1")[0] == {"cdi.k8s.io/vfio1": "v.com/gpu=0"}


async def test_a_device_that_comes_with_a_container_is_plugged_and_leaves_with_it(stack: Stack) -> None:
    prepare(stack, cold_plug_vfio="no-port", hot_plug_vfio="root-port", pcie_root_port=2)
    await stack.run("c1", ["sleep"], annotations=SANDBOX)
    app = await stack.run("a1", ["exit", "0"], annotations=member("a"), linux=vfio(5))
    vm = stack.hypervisors[0]
    assert list(vm.plugged) == ["0000:05:00.0"]
    await until(lambda: saved_devices(stack))
    assert saved_devices(stack) == [("/dev/vfio/5", False, {"0000:05:00.0": "02/01"})]
    assert agent_saw(stack, "a1")[:3] == ({"cdi.k8s.io/vfio5": "nvidia.com/gpu=0"}, ["0000:05:00.0=02/01"], [])

    await stack.pod.wait(app, None)
    await stack.pod.delete(app, None)
    assert vm.plugged == {}
    assert saved_devices(stack) == []
    await stack.run("a2", ["sleep"], annotations=member("a"), linux=vfio(5))

    assert list(vm.plugged) == ["0000:05:00.0"]


async def with_an_ended_container(stack: Stack) -> ContainerId:
    """A pod's container with a device has ended; it is to be deleted still."""
    prepare(stack, cold_plug_vfio="no-port", hot_plug_vfio="root-port", pcie_root_port=2)
    await stack.run("c1", ["sleep"], annotations=SANDBOX)
    app = await stack.run("a1", ["exit", "0"], annotations=member("a"), linux=vfio(5))
    await stack.pod.wait(app, None)
    return app


async def test_a_guest_that_keeps_a_device_delays_no_other_device(stack: Stack) -> None:
    app = await with_an_ended_container(stack)
    vm = stack.hypervisors[0]
    vm.may_unplug.clear()
    await stack.pod.delete(app, None)

    async with asyncio.timeout(5):
        await stack.run("b1", ["sleep"], annotations=member("b"), linux=vfio(6))

    again = asyncio.ensure_future(stack.create("a2", ["sleep"], annotations=member("a"), linux=vfio(5)))
    await asyncio.sleep(1)
    assert not again.done(), "what leaves the VM cannot be given before it has left"
    vm.may_unplug.set()
    await again
    assert list(vm.plugged) == ["0000:06:00.0", "0000:05:00.0"]


@pytest.mark.parametrize("step", ["plug", "CreateContainer"])
async def test_a_create_that_fails_takes_its_devices_along(step: str, stack: Stack) -> None:
    prepare(stack, cold_plug_vfio="no-port", hot_plug_vfio="bridge-port")
    await stack.run("c1", ["sleep"], annotations=SANDBOX)
    if step == "plug":
        stack.host.faults.plan({"plug": 2})
    else:
        stack.agent.failures[step] = (13, "no")

    with pytest.raises(ShimError):
        await stack.create("a1", ["sleep"], annotations=member("a"), linux=vfio(5, 6))

    assert stack.hypervisors[0].plugged == {}


async def test_a_create_given_up_while_it_plugs_takes_the_device_back(stack: Stack) -> None:
    prepare(stack, cold_plug_vfio="no-port", hot_plug_vfio="root-port")
    await stack.run("c1", ["sleep"], annotations=SANDBOX)

    await give_up_while_it_plugs(stack, "a1", annotations=member("a"), linux=vfio(5))

    assert stack.hypervisors[0].plugged == {}


async def test_an_unannounced_device_needs_hot_plug(stack: Stack) -> None:
    prepare(stack, device(1, "a"))
    await stack.run("c1", ["sleep"], annotations=SANDBOX)

    with pytest.raises(FailedPrecondition, match=r"pass 0000:09:00\.0 through: it is not among the devices the vm was"):
        await stack.create("a1", ["sleep"], annotations=member("a"), linux=vfio(9))


async def test_a_device_where_none_may_pass_is_an_error_instead_of_silence(stack: Stack) -> None:
    with pytest.raises(FailedPrecondition, match="pass '/dev/vfio/9' through: cold_plug_vfio and hot_plug_vfio"):
        await stack.create("c1", ["sleep"], linux=vfio(9))


async def test_more_devices_than_ports_start_no_vm(stack: Stack) -> None:
    prepare(stack, device(1, "a"), device(2, "a"), pcie_root_port=1)

    with pytest.raises(ResourceExhausted, match="place 2 devices: pcie_root_port = 1"):
        await stack.create("c1", ["sleep"], annotations=SANDBOX)
    assert stack.hypervisors == []


async def test_what_cannot_be_found_starts_no_vm(stack: Stack) -> None:
    prepare(stack)

    async def fail(question: DeviceQuestion) -> PodDevices:
        raise NotFound("resolve cdi devices: no spec defines 'v.com/gpu=1', 'v.com/gpu=2'")

    stack.find_devices = fail
    with pytest.raises(NotFound, match=r"'v\.com/gpu=1', 'v\.com/gpu=2'"):
        await stack.create("c1", ["sleep"], annotations=SANDBOX)
    assert stack.hypervisors == []


async def test_a_device_that_two_containers_name_leaves_with_the_last_of_them(stack: Stack) -> None:
    prepare(stack, cold_plug_vfio="no-port", hot_plug_vfio="root-port", pcie_root_port=2)
    await stack.run("c1", ["sleep"], annotations=SANDBOX)
    vm = stack.hypervisors[0]
    containers = [
        await stack.run(name, ["exit", "0"], annotations=member(name), linux=vfio(5)) for name in ("a1", "b1")
    ]
    left = []

    for container in containers:
        await stack.pod.wait(container, None)
        await stack.pod.delete(container, None)
        left.append(list(vm.plugged))

    assert left == [["0000:05:00.0"], []]
