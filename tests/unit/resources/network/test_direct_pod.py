"""A sandbox whose network a file describes: what the VM is made of, what the guest gets, and when it is refused."""

import json
from typing import Any

import pytest

from pyshim.model.errors import FailedPrecondition, InvalidArgument, ShimError
from pyshim.model.vm import LocalVm, MemoryBacking, PortKind
from tests.unit.pod.conftest import DOCUMENT, Stack

FILE = "/run/kata-containers/dans/c1.json"
NETNS: dict[str, Any] = {"linux": {"namespaces": [{"type": "network", "path": "/run/netns/pod"}]}}
SANDBOX = {
    "io.kubernetes.cri.container-type": "sandbox",
    "io.kubernetes.cri.sandbox-id": "c1",
    "io.kubernetes.cri.image-name": "pause",
}
CARD, OTHER = "0000:41:08.0", "0000:41:08.1"


def device(name: str, mac: str, **device: Any) -> dict[str, Any]:
    info = {"interface": {"ip_addresses": ["10.9.0.2/24"]}, "routes": [{"gateway": "10.9.0.1"}]}
    return {"name": name, "guest_mac": mac, "device": device, "network_info": info}


SOCKET = device("eth0", "02:00:00:00:00:07", type="vhost-user", path="/run/ovs/a.sock")
FIRST = device("eth1", "02:00:00:00:00:08", type="vfio", pci_device_id=CARD)
SECOND = device("eth2", "02:00:00:00:00:09", type="vfio", pci_device_id=OTHER)


async def started(stack: Stack, *devices: dict[str, Any], **hypervisor: Any) -> LocalVm:
    stack.host.files[FILE] = json.dumps({"devices": list(devices)}).encode()
    qemu = {**DOCUMENT["hypervisor"]["qemu"], **hypervisor}
    stack.document = {"hypervisor": {"qemu": qemu}, "runtime": {"experimental_force_guest_pull": True}}
    await stack.run("c1", ["sleep"], **NETNS, annotations=SANDBOX)
    config = stack.hypervisors[0].config
    assert config is not None
    return config


def configured(stack: Stack) -> list[tuple[str, str, str]]:
    return [(item.name, item.hwAddr, item.devicePath) for item in stack.agent.interfaces]


async def test_a_socket_is_a_device_of_the_vm_and_the_namespace_is_left_alone(stack: Stack) -> None:
    vm = await started(stack, SOCKET)

    (nic,) = vm.vhost_user_nics
    assert (nic.socket_path, nic.mac, nic.queues) == ("/run/ovs/a.sock", "02:00:00:00:00:07", 1)
    assert (vm.nics, vm.pci.placed) == ((), ())
    assert configured(stack) == [("eth0", "02:00:00:00:00:07", "")]
    assert [[item.device for item in routes] for routes in stack.agent.routes] == [["eth0"]]
    assert stack.networks.network.looks == 0


async def test_guest_memory_is_shared_with_who_serves_the_socket_though_no_file_is_shared(stack: Stack) -> None:
    vm = await started(stack, SOCKET, shared_fs="none", network_queues=4)

    assert vm.memory.backing is MemoryBacking.SHARED_MEMFD
    assert vm.vhost_user_nics[0].queues == 4


async def test_functions_are_cold_plugged_on_ports_of_their_own_and_told_by_their_places(stack: Stack) -> None:
    vm = await started(stack, FIRST, SOCKET, SECOND, cold_plug_vfio="root-port")

    placed = [(item.device.id, item.bus, item.pci_path) for item in vm.pci.placed]
    assert placed == [(CARD, "rp0", "1d/00"), (OTHER, "rp1", "1e/00")]
    assert configured(stack) == [
        ("eth1", "02:00:00:00:00:08", "1d/00"),
        ("eth0", "02:00:00:00:00:07", ""),
        ("eth2", "02:00:00:00:00:09", "1e/00"),
    ]
    assert vm.start_timeout_s > 60


async def test_functions_are_hot_plugged_before_the_guest_is_told_of_them(stack: Stack) -> None:
    vm = await started(stack, FIRST, SECOND, hot_plug_vfio="root-port")

    assert vm.pci.placed == ()
    assert vm.pci.hot_plug is PortKind.ROOT
    # One for each, and the spare one for an unannounced device.
    assert [port.id for port in vm.pci.ports] == ["rp0", "rp1", "rp2"]
    assert list(stack.hypervisors[0].plugged) == [CARD, OTHER]
    assert [path for _, _, path in configured(stack)] == ["02/01", "02/02"]


@pytest.mark.parametrize(
    ("devices", "hypervisor", "kind", "text"),
    [
        (
            [FIRST],
            {},
            FailedPrecondition,
            f"pass '{CARD}' of '{FILE}' through: cold_plug_vfio and hot_plug_vfio in 'test",
        ),
        ([FIRST, SECOND], {"cold_plug_vfio": "root-port", "pcie_root_port": 1}, ShimError, "place 2 devices"),
        ([{**SOCKET, "guest_mac": "x"}], {}, InvalidArgument, f"read '{FILE}': devices[0]: guest_mac 'x' is not a MAC"),
    ],
    ids=["no-port", "too-few-ports", "malformed"],
)
async def test_what_cannot_be_is_refused_before_there_is_a_vm(
    devices: list[dict[str, Any]], hypervisor: dict[str, Any], kind: type[ShimError], text: str, stack: Stack
) -> None:
    with pytest.raises(kind) as refused:
        await started(stack, *devices, **hypervisor)
    assert text in str(refused.value)
    assert stack.hypervisors[0].config is None
    assert stack.networks.network.wired == set()


async def test_a_function_the_vm_cannot_take_fails_the_sandbox_and_is_given_back(stack: Stack) -> None:
    stack.host.faults.plan({"plug": 2})

    with pytest.raises(FailedPrecondition, match="plug: injected fault"):
        await started(stack, FIRST, SECOND, hot_plug_vfio="bridge-port")

    assert stack.networks.network.wired == set()


async def test_a_file_for_another_sandbox_changes_nothing(stack: Stack) -> None:
    stack.host.files["/run/kata-containers/dans/c2.json"] = b'{"devices": []}'

    await stack.run("c1", ["sleep"], **NETNS)

    assert configured(stack) == [("eth0", stack.networks.network.nics[0].mac, "")]
