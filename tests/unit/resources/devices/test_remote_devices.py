"""A pod's devices in a remote VM, on fakes: those that choose the VM, and each container's own by name."""

import json
from typing import Any

import pytest

from integration.remote.edits import edit_container
from pyshim.model.devices import DeviceQuestion, DeviceRequest, FoundDevice, PodDevices
from pyshim.model.errors import FailedPrecondition, ShimError, Unimplemented
from pyshim.model.vm import RemoteVm
from tests.unit.pod.conftest import Stack
from tests.unit.resources.devices.test_instances import TABLE

SANDBOX = {
    "io.kubernetes.cri.container-type": "sandbox",
    "io.kubernetes.cri.sandbox-id": "c1",
    "io.kubernetes.cri.sandbox-name": "pod",
    "io.kubernetes.cri.sandbox-namespace": "ns",
}
NETWORK: dict[str, Any] = {"namespaces": [{"type": "network"}]}
HYPERVISOR = "io.katacontainers.config.hypervisor."


def member(name: str, **more: str) -> dict[str, str]:
    own = {"io.kubernetes.cri.container-type": "container", "io.kubernetes.cri.container-name": name}
    return {**SANDBOX, **own, "io.kubernetes.cri.image-name": "r/i:1", **more}


def request(name: str, container: str = "", origin: str = "device plugin") -> FoundDevice:
    return FoundDevice(request=DeviceRequest(name=name, origin=origin, container=container), nodes=())


def prepare(stack: Stack, *given: FoundDevice) -> list[DeviceQuestion]:
    """The kubelet gave the pod `given`; a container finds what its annotations name. Every question is remembered."""
    questions: list[DeviceQuestion] = []

    async def find(question: DeviceQuestion) -> PodDevices:
        questions.append(question)
        named = tuple(request(name, origin="annotation") for name in question.annotations.values())
        return PodDevices(devices=(*given, *named) if question.kubelet_socket else named)

    stack.find_devices = find
    runtime = {"pod_resource_api_sock": "/run/kubelet.sock", "pod_annotations": ["io.katacontainers.*", "cdi.k8s.io/*"]}
    stack.document = {"hypervisor": {"remote": {}}, "runtime": runtime}
    return questions


def agent_saw(stack: Stack, container: str) -> dict[str, str]:
    found = stack.agent.containers[container].OCI.Annotations
    return {key: value for key, value in found.items() if key.startswith("cdi.k8s.io/")}


async def test_the_vm_is_chosen_by_the_sum_and_each_container_has_its_share(stack: Stack) -> None:
    questions = prepare(
        stack,
        request("nvidia.com/pgpu=GPU-1", "a"),
        request("nvidia.com/gpu=claimed", "b", origin="claim ns/two"),
        request("nvidia.com/pgpu=GPU-2", "b"),
    )

    await stack.run("c1", ["sleep"], annotations={**SANDBOX, "cdi.k8s.io/x": "nvidia.com/gpu=extra"}, linux=NETWORK)
    await stack.run("a1", ["sleep"], annotations=member("a"))
    await stack.run("b1", ["sleep"], annotations=member("b", **{"cdi.k8s.io/x": "nvidia.com/gpu=extra"}))
    await stack.run("n1", ["sleep"], annotations=member("none"))

    assert questions[0].names_only
    vm = stack.hypervisors[0].config
    assert isinstance(vm, RemoteVm)
    assert vm.service.annotations[f"{HYPERVISOR}default_gpus"] == "4"
    claims = json.loads(vm.service.annotations["io.pyshim.device-claims"])
    assert [(claim["container"], claim["device"], claim["origin"]) for claim in claims] == [
        ("a", "nvidia.com/pgpu=GPU-1", "device plugin"),
        ("b", "nvidia.com/gpu=claimed", "claim ns/two"),
        ("b", "nvidia.com/pgpu=GPU-2", "device plugin"),
        ("", "nvidia.com/gpu=extra", "annotation"),
    ]
    assert agent_saw(stack, "a1") == {"cdi.k8s.io/device0": "nvidia.com/gpu=0"}
    assert sorted(agent_saw(stack, "b1").values()) == ["nvidia.com/gpu=1", "nvidia.com/gpu=2", "nvidia.com/gpu=3"]
    assert agent_saw(stack, "n1") == {}


@pytest.mark.parametrize(
    ("given", "devices", "text"),
    [
        (("mellanox.com/nic=1", "v.com/fpga=0"), (), r"'mellanox\.com/nic=1' by device plugin, 'v\.com/fpga=0' by"),
        ((), (("/dev/vfio/7", "c", 234, 1), ("/dev/sdx", "b", 8, 0)), "pass '/dev/vfio/7', '/dev/sdx' through"),
    ],
    ids=["kinds", "nodes"],
)
async def test_a_device_that_no_remote_guest_can_have_makes_no_vm(
    given: tuple[str, ...], devices: tuple[tuple[str, str, int, int], ...], text: str, stack: Stack
) -> None:
    nodes = [{"path": path, "type": kind, "major": major, "minor": minor} for path, kind, major, minor in devices]

    prepare(stack, *(request(name) for name in given))
    with pytest.raises(Unimplemented, match=text):
        await stack.create("c1", ["sleep"], annotations=SANDBOX, linux={**NETWORK, "devices": nodes})
    assert stack.hypervisors == []


@pytest.mark.parametrize(
    ("annotations", "devices", "kind", "text"),
    [
        ({"cdi.k8s.io/x": "nvidia.com/gpu=late"}, [], FailedPrecondition, r"'nvidia\.com/gpu=late': the vm was made"),
        ({}, [{"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0}], Unimplemented, "pass '/dev/nvidia0'"),
    ],
    ids=["late", "node"],
)
async def test_a_container_that_asks_for_what_the_vm_has_not_is_refused(
    annotations: dict[str, str], devices: list[dict[str, Any]], kind: type[ShimError], text: str, stack: Stack
) -> None:
    prepare(stack)
    await stack.run("c1", ["sleep"], annotations=SANDBOX, linux=NETWORK)
    with pytest.raises(kind, match=text):
        await stack.create("a1", ["sleep"], annotations=member("a", **annotations), linux={"devices": devices})
    assert "a1" not in stack.agent.containers


async def test_devices_that_every_kernel_has_are_no_devices_of_this_host(stack: Stack) -> None:
    prepare(stack)
    await stack.run("c1", ["sleep"], annotations=SANDBOX, linux=NETWORK)
    fuse = {"path": "/dev/fuse", "type": "c", "major": 10, "minor": 229}

    await stack.run("a1", ["sleep"], annotations=member("a"), linux={"devices": [fuse]})

    assert [device.Path for device in stack.agent.containers["a1"].OCI.Linux.Devices] == ["/dev/fuse"]


@pytest.mark.parametrize(
    ("given", "count", "seen_by_a"),
    [
        (("nvidia.com/gpu=0", "nvidia.com/gpu=1"), "2", ["nvidia.com/gpu=0"]),
        ((), "0", []),
        ((), "2", ["nvidia.com/gpu=all"]),
    ],
    ids=["devices known", "none asked for", "only their number known"],
)
async def test_the_adaptors_edit_gives_all_gpus_only_where_nothing_says_whose_they_are(
    given: tuple[str, ...], count: str, seen_by_a: list[str], stack: Stack
) -> None:
    """containerd copies the pod's annotation to each container, and the adaptor's proxy looks for it there."""

    prepare(stack, *(request(name, container) for name, container in zip(given, "ab", strict=False)))
    stack.agent.edit_container = edit_container
    asked = {f"{HYPERVISOR}default_gpus": count}

    await stack.run("c1", ["sleep"], annotations={**SANDBOX, **asked}, linux=NETWORK)
    await stack.run("a1", ["sleep"], annotations=member("a", **asked))
    await stack.run("n1", ["sleep"], annotations=member("none", **asked))

    assert list(agent_saw(stack, "a1").values()) == seen_by_a
    assert list(agent_saw(stack, "n1").values()) == [name for name in seen_by_a if name.endswith("all")]


async def test_devices_of_a_claim_choose_the_instance_type(stack: Stack) -> None:
    """The type has all that the pod was given; a type that the pod asks for and that lacks it is refused by name."""
    prepare(
        stack,
        request("pyshim.io/h100=h100-4", "a", origin="claim ns/one"),
        request("pyshim.io/h100=h100-0", "b", origin="claim ns/two"),
    )
    stack.host.files["/etc/pyshim/instances.toml"] = TABLE.encode()
    stack.document["runtime"]["instance_types"] = "/etc/pyshim/instances.toml"
    stack.document["hypervisor"]["remote"]["machine_type"] = "p5.4xlarge"
    with pytest.raises(FailedPrecondition, match=r"for 2 h100: machine_type 'p5\.4xlarge' has not"):
        await stack.run("c1", ["sleep"], annotations=SANDBOX, linux=NETWORK)
    del stack.document["hypervisor"]["remote"]["machine_type"]
    await stack.run("c1", ["sleep"], annotations=SANDBOX, linux=NETWORK)
    await stack.run("a1", ["sleep"], annotations=member("a"))
    await stack.run("b1", ["sleep"], annotations=member("b"))

    vm = stack.hypervisors[-1].config
    assert isinstance(vm, RemoteVm)
    found = vm.service.annotations
    assert stack.records[0].snapshots[-1].origin == "booted as p5.48xlarge"
    words = ("machine_type", "default_gpus", "default_gpu_model")
    assert [found[f"{HYPERVISOR}{word}"] for word in words] == ["p5.48xlarge", "2", "H100"]
    assert agent_saw(stack, "a1") == {"cdi.k8s.io/device0": "nvidia.com/gpu=0"}
    assert agent_saw(stack, "b1") == {"cdi.k8s.io/device0": "nvidia.com/gpu=1"}


@pytest.mark.parametrize(
    ("files", "error"), [({}, "read '/t.toml'"), ({"/t.toml": b"[[type]"}, "read instance types '/t.toml'")]
)
async def test_a_table_that_cannot_be_read_refuses_the_pod(stack: Stack, files: dict[str, bytes], error: str) -> None:
    prepare(stack)
    stack.host.files.update(files)
    stack.document["runtime"]["instance_types"] = "/t.toml"
    with pytest.raises(ShimError, match=error):
        await stack.run("c1", ["sleep"], annotations=SANDBOX, linux=NETWORK)
