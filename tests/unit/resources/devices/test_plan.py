"""Devices passed through: questions, kinds, indices, messages, what the guest's spec becomes."""

from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from pyshim.config.load import build_config
from pyshim.config.sources import Source
from pyshim.model.config import Config
from pyshim.model.devices import DeviceQuestion, DeviceRequest, FoundDevice, HostFunction, PodDevices, VfioNode
from pyshim.model.errors import FailedPrecondition, InvalidArgument
from pyshim.model.guest import GuestContainer
from pyshim.model.oci import NO_HOOKS, ContainerKind, OciDevice, OciSpec
from pyshim.model.vm import PortKind, VfioDevice
from pyshim.pod.plan.kernel_params import kernel_params
from pyshim.resources.devices.plan.devices import (
    Passed,
    check_kind_table,
    container_question,
    device_layout,
    device_message,
    guest_kind,
    inner_names,
    memory_nodes,
    passed_nodes,
    sandbox_question,
    with_passed,
)

SOCKET = "/var/lib/kubelet/pod-resources/kubelet.sock"
POD = {"io.kubernetes.cri.sandbox-name": "pod", "io.kubernetes.cri.sandbox-namespace": "ns"}


def config(cold: str = "root-port", hot: str = "no-port", **runtime: object) -> Config:
    document = {
        "hypervisor": {
            "qemu": {
                "path": "/q",
                "kernel": "/k",
                "image": "/i",
                "virtio_fs_daemon": "/v",
                "cold_plug_vfio": cold,
                "hot_plug_vfio": hot,
            }
        },
        "runtime": {"pod_resource_api_sock": SOCKET, **runtime},
    }
    return build_config(Source(path="/etc/c.toml", directory="/", document=document))


def spec(annotations: Mapping[str, str] | None = None, *nodes: str) -> OciSpec:
    return OciSpec(
        root_path="/",
        hostname="",
        terminal=False,
        mounts=(),
        namespaces=(),
        devices=tuple(OciDevice(path=path, type="c", major=1, minor=1) for path in nodes),
        cgroups_path="",
        annotations=annotations or {},
        hooks=NO_HOOKS,
        raw={},
    )


def function(address: str, class_code: str = "0x030200", vendor: str = "0x10de") -> HostFunction:
    return HostFunction(address=address, vendor=vendor, device="0x2331", class_code=class_code)


def node(path: str, *functions: HostFunction) -> VfioNode:
    return VfioNode(path=path, functions=functions)


def found(name: str, *nodes: VfioNode, container: str = "", env: tuple[str, ...] = ()) -> FoundDevice:
    return FoundDevice(request=DeviceRequest(name=name, origin="test", container=container), nodes=nodes, env=env)


@pytest.mark.parametrize(
    ("kind", "asked", "settings", "question"),
    [
        (
            ContainerKind.POD_SANDBOX,
            spec(POD),
            {},
            DeviceQuestion(pod_name="pod", pod_namespace="ns", kubelet_socket=SOCKET),
        ),
        (
            ContainerKind.POD_SANDBOX,
            spec(
                {
                    "io.kubernetes.cri-o.ContainerType": "sandbox",
                    "io.kubernetes.pod.name": "p",
                    "io.kubernetes.pod.namespace": "n",
                    "cdi.k8s.io/a": "v/c=1",
                }
            ),
            {},
            DeviceQuestion(
                pod_name="p", pod_namespace="n", kubelet_socket=SOCKET, annotations={"cdi.k8s.io/a": "v/c=1"}
            ),
        ),
        (ContainerKind.POD_SANDBOX, spec(POD), {"pod_resource_api_sock": ""}, DeviceQuestion()),
        (ContainerKind.POD_SANDBOX, spec(POD), {"cold": "no-port", "hot": "root-port"}, DeviceQuestion()),
        (ContainerKind.POD_SANDBOX, spec(POD), {"cold": "no-port"}, DeviceQuestion()),
        (
            ContainerKind.SINGLE_CONTAINER,
            spec({"cdi.k8s.io/a": "v/c=1", "x": "y"}, "/dev/null", "/dev/vfio/vfio", "/dev/vfio/7"),
            {},
            DeviceQuestion(annotations={"cdi.k8s.io/a": "v/c=1"}, nodes=("/dev/vfio/7",)),
        ),
    ],
)
def test_what_is_asked_before_the_vm_is_made(
    kind: ContainerKind, asked: OciSpec, settings: dict[str, Any], question: DeviceQuestion
) -> None:
    assert sandbox_question(kind, asked, config(**settings)) == question


def test_a_pod_without_a_name_cannot_be_asked_about() -> None:
    with pytest.raises(InvalidArgument, match="the sandbox's annotations do not name the pod"):
        sandbox_question(ContainerKind.POD_SANDBOX, spec(), config())


def test_what_is_asked_for_a_container() -> None:
    known = PodDevices(devices=(found("v/c=1", node("/dev/vfio/1", function("a"))),))
    asked = spec({"cdi.k8s.io/a": "v/c=1"}, "/dev/vfio/1", "/dev/vfio/2", "/dev/vfio/devices/vfio3")

    assert container_question(asked, config(), known) == DeviceQuestion(
        annotations={"cdi.k8s.io/a": "v/c=1"}, nodes=("/dev/vfio/2", "/dev/vfio/devices/vfio3")
    )
    assert container_question(spec({"cdi.k8s.io/a": "v/c=1"}), config("no-port"), known) == DeviceQuestion()
    with pytest.raises(FailedPrecondition, match="pass '/dev/vfio/1' through: cold_plug_vfio and hot_plug_vfio in"):
        container_question(asked, config("no-port"), PodDevices())


@pytest.mark.parametrize("wanted", [True, False])
def test_the_guest_has_an_iommu_and_is_told_so_when_the_configuration_says_so(wanted: bool) -> None:
    plain = config()
    asked = replace(plain, hypervisor=replace(plain.hypervisor, enable_iommu=wanted))

    assert device_layout(asked, PodDevices()).iommu is wanted
    params = kernel_params(asked, max_vcpus=1, root_on_pmem=False, serial_agent=False, emulated=False)
    assert ({"intel_iommu=on", "iommu=pt"} <= set(params)) is wanted


@pytest.mark.parametrize(
    ("memory", "nodes"),
    [
        ({}, ()),
        ({"a": {"": 1 << 30}}, ()),
        ({"a": {"1": 1 << 30}, "b": {"1": 1 << 21}}, (1,)),
        ({"a": {"0,1": 1 << 30}, "b": {"3": 1 << 30}}, (0, 1, 3)),
    ],
    ids=["none", "no-topology", "one", "several"],
)
def test_the_nodes_where_the_kubelet_keeps_memory(memory: dict[str, dict[str, int]], nodes: tuple[int, ...]) -> None:
    assert memory_nodes(PodDevices(memory=memory)) == nodes


def test_every_function_of_every_node_gets_a_port() -> None:
    shared = node("/dev/vfio/1", function("0000:65:00.0"), function("0000:65:00.1", "0x040300"))
    own = node("/dev/vfio/devices/vfio3", function("0000:66:00.0"))
    devices = PodDevices(devices=(found("v/c=1", shared), found("v/c=2", shared, own)))

    layout = device_layout(config(), devices)

    assert [(placed.device.id, placed.pci_path) for placed in layout.placed] == [
        ("0000:65:00.0", "1c/00"),
        ("0000:65:00.1", "1d/00"),
        ("0000:66:00.0", "1e/00"),
    ]
    last = layout.placed[2].device
    assert isinstance(last, VfioDevice)
    assert (last.iommufd, last.vendor_id, last.device_id) == (True, "0x10de", "0x2331")
    assert device_layout(config("no-port", "bridge-port"), PodDevices()).hot_plug is PortKind.BRIDGE


TABLE = config().runtime.vfio_device_kinds


@pytest.mark.parametrize(
    ("host_kind", "vendor", "class_code", "kind"),
    [
        ("", "0x10de", "0x030200", "nvidia.com/gpu"),
        ("", "0x10de", "0x030000", "nvidia.com/gpu"),
        ("", "0x8086", "0x038000", "intel.com/gpu"),
        ("", "0x1002", "0x120000", "amd.com/gpu"),
        ("", "0x15b3", "0x020700", "nvidia.com/nic"),
        ("", "0x10de", "0x068000", ""),
        ("", "0x1af4", "0x010000", ""),
        ("toy.org/edu", "0x10de", "0x030200", "toy.org/edu"),
        ("nvidia.com/pgpu", "0x10de", "0x030200", "nvidia.com/gpu"),
    ],
)
def test_kinds_by_the_hosts_name_and_else_by_vendor_and_class(
    host_kind: str, vendor: str, class_code: str, kind: str
) -> None:
    assert guest_kind(function("a", class_code, vendor), host_kind, TABLE) == kind


@pytest.mark.parametrize(
    "row", "|10de=x/y|10de:03|10de:03=gpu|10DE:03=x/y|10de:0302000=x/y|a/b=c|a/b|a/b=c/d:|10de:03=a/b:H100".split("|")
)
def test_rows_that_mean_nothing_are_refused(row: str) -> None:
    with pytest.raises(InvalidArgument, match="read vfio_device_kinds in"):
        check_kind_table(("10de:03=nvidia.com/gpu", row), "/etc/c.toml")


def test_the_default_rows_mean_something() -> None:
    check_kind_table((*TABLE, "nvidia.com/GH100=nvidia.com/gpu:NVIDIA H100"), "")


def test_a_model_is_no_part_of_the_kind() -> None:
    assert guest_kind(function("a"), "v.com/big", ("v.com/big=v.com/gpu:H100",)) == "v.com/gpu"


def passed(path: str, host_kind: str, *functions: tuple[HostFunction, str]) -> Passed:
    return Passed(
        node=node(path, *(each for each, _ in functions)),
        pci_paths={each.address: pci_path for each, pci_path in functions},
        host_kind=host_kind,
    )


def test_indices_count_over_the_vm_in_guest_order_by_kind() -> None:
    everything = [
        passed("/dev/vfio/9", "", (function("a"), "1e/00")),
        passed("/dev/vfio/1", "nvidia.com/pgpu", (function("b"), "1c/00"), (function("c", "0x040300"), "1d/00")),
        passed("/dev/vfio/5", "", (function("d", "0x020700", "0x15b3"), "1b/00")),
        passed("/dev/vfio/6", "", (function("e", "0x0c0330", "0x1af4"), "1a/00")),
        passed("/dev/vfio/7", "", (function("f"), "02/0a"), (function("g"), "02/09.1")),
    ]

    assert inner_names(everything, TABLE) == {
        "/dev/vfio/7": ("nvidia.com/gpu=0", "nvidia.com/gpu=1"),
        "/dev/vfio/1": ("nvidia.com/gpu=2",),
        "/dev/vfio/9": ("nvidia.com/gpu=3",),
        "/dev/vfio/5": ("nvidia.com/nic=0",),
        "/dev/vfio/6": (),
    }


def test_a_node_found_twice_keeps_the_name_it_has() -> None:
    gpu = node("/dev/vfio/1", function("a"))

    both = passed_nodes([found("", gpu), found("v.com/gpu=0", gpu), found("w.com/x=0", gpu)], {"a": "1e/00"})

    assert [each.host_kind for each in both] == ["v.com/gpu"]


GUEST = GuestContainer(
    container_id="c1",
    spec={
        "process": {"env": ["A=1", "GPU=own"]},
        "annotations": {"x": "y"},
        "linux": {"devices": [{"path": "/dev/vfio/12"}, {"path": "/dev/vfio/vfio"}, {"path": "/dev/null"}]},
    },
    storages=(),
    devices=(),
    shared_pid_namespace=False,
)
OWN = passed("/dev/vfio/12", "", (function("0000:65:00.0"), "1c/00"), (function("0000:65:00.1", "0x040300"), "1d/00"))
ENV = ("GPU=host", "NEW=1", "NEW=2")


def test_a_guest_kernel_device_is_a_message_and_an_annotation() -> None:
    guest = with_passed(GUEST, [OWN], {"/dev/vfio/12": ("nvidia.com/gpu=0",)}, ENV, "guest-kernel")

    assert guest.spec == {
        "process": {"env": ["A=1", "GPU=own", "NEW=2"]},
        "annotations": {"x": "y", "cdi.k8s.io/vfio12": "nvidia.com/gpu=0"},
        "linux": {"devices": [{"path": "/dev/null"}]},
    }
    (message,) = guest.devices
    assert (message.id, message.type, message.container_path) == ("12", "vfio-pci-gk", "/dev/vfio/12")
    assert message.options == ("0000:65:00.0=1c/00", "0000:65:00.1=1d/00")
    assert GUEST.spec["annotations"] == {"x": "y"}, "the plan stays as it was"


def test_a_device_of_no_known_kind_has_no_annotation() -> None:
    guest = with_passed(GUEST, [OWN], {"/dev/vfio/12": ()}, (), "guest-kernel")

    assert guest.spec["annotations"] == {"x": "y"}
    assert len(guest.devices) == 1


def test_a_device_the_container_drives_keeps_its_node() -> None:
    guest = with_passed(GUEST, [OWN], {"/dev/vfio/12": ("nvidia.com/gpu=0",)}, ENV, "vfio")

    assert guest.spec["annotations"] == {"x": "y"}
    assert guest.spec["linux"] == GUEST.spec["linux"]
    assert guest.devices[0].type == "vfio-pci"


def test_the_iommufd_node_has_a_number_too() -> None:
    own = passed("/dev/vfio/devices/vfio3", "v.com/x", (function("a"), "1e/00"))

    guest = with_passed(GUEST, [own], inner_names([own], TABLE), (), "guest-kernel")

    assert guest.spec["annotations"]["cdi.k8s.io/vfio3"] == "v.com/x=0"
    assert device_message(own, "guest-kernel").id == "vfio3"
    assert replace(own.node, path="/dev/vfio/12").number == "12"
