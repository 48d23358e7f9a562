"""The host's files that QEMU and the vsock program see, as values, each with its reason."""

from typing import Any

import pytest
from msgspec.structs import replace

from hypervisors.qemu.isolation import host_view_reason, vmm_view, vsock_view
from pyshim.host.mounts.view import ViewPath
from pyshim.model.confidential import TdxGuard, UnixQuotes
from pyshim.model.host_facts import Accelerator
from pyshim.model.vm import (
    EmulatedDevice,
    ExtensionDisk,
    LocalVm,
    PciLayout,
    PlacedDevice,
    PortKind,
    VfioDevice,
    VhostUserNic,
    VhostUserVsockChannel,
)
from tests.fakes.vm_config import vm_config

QEMU = "/usr/bin/qemu-system-x86_64"
CODE = {
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/gnu/store"),
    *("/etc/ld.so.cache", "/etc/ld.so.preload", "/etc/alternatives"),
}
NODES = {"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"}


def kept(config: LocalVm, program: str = QEMU) -> dict[str, ViewPath]:
    return {each.path: each for each in vmm_view(config, program=program)}


def test_a_plain_vm_sees_code_its_files_and_a_few_nodes() -> None:
    config = vm_config()

    found = kept(config)

    own = {config.boot.kernel, config.boot.initrd, config.boot.image, "/run/vc/vm/pod1/vhost-fs.sock"}
    assert set(found) == CODE | NODES | own | {QEMU, "/sys"}
    assert [each.path for each in found.values() if each.is_writable] == []
    assert {each.path for each in found.values() if each.may_lack} == (CODE | NODES | {"/sys"}) - {
        config.entropy_source,
        "/usr",
    }
    assert all(each.why for each in found.values())
    assert found["/usr"].why == "QEMU's own libraries, firmware and data"


@pytest.mark.parametrize(
    ("changes", "path", "why"),
    [
        ({"initdata": "/run/vc/vm/pod1/initdata"}, "/run/vc/vm/pod1/initdata", "initdata"),
        ({"entropy_source": "/dev/hwrng"}, "/dev/hwrng", "entropy"),
        ({"extensions": (ExtensionDisk(name="debug", path="/srv/debug.img"),)}, "/srv/debug.img", "'debug'"),
        (
            {
                "vhost_user_nics": (
                    VhostUserNic(id="n0", mac="", socket_path="/run/ovs/n0", queues=1, queue_size=0, mtu=0),
                )
            },
            "/run/ovs/n0",
            "'n0'",
        ),
    ],
    ids=["initdata", "entropy", "extension", "vhost-user-nic"],
)
def test_files_of_the_configuration_are_seen_and_must_exist(changes: dict[str, Any], path: str, why: str) -> None:
    found = kept(vm_config(**changes))[path]

    assert why in found.why
    assert (found.may_lack, found.is_writable) == (False, False)


@pytest.mark.parametrize(
    ("program", "home"),
    [
        ("/opt/kata/bin/qemu-system-x86_64", "/opt/kata"),
        ("/usr/local/libexec/qemu", "/usr/local"),
        ("/srv/qemu/build/qemu-system-x86_64", "/srv/qemu/build"),
        ("/bin/qemu-system-x86_64", "/bin/qemu-system-x86_64"),
        ("/qemu-system-x86_64", "/qemu-system-x86_64"),
    ],
)
def test_files_installed_beside_the_program_are_seen(program: str, home: str) -> None:
    found = [each.path for each in vmm_view(vm_config(hypervisor_path="/etc/alternatives/qemu"), program=program)]

    assert {home, "/etc/alternatives/qemu"} <= set(found)
    assert "/" not in found


def test_the_kvm_device_is_seen_if_it_is_the_accelerator() -> None:
    config = vm_config()

    assert "/dev/kvm" not in kept(config)
    assert not kept(replace(config, cpu=replace(config.cpu, accelerator=Accelerator.KVM)))["/dev/kvm"].may_lack


TDX = TdxGuard(mrconfigid=b"", quotes=UnixQuotes(path="/var/run/tdx-qgs/qgs.socket"))
VFIO = VfioDevice(id="v", host_address="0000:65:00.0", iommufd=True)


@pytest.mark.parametrize(
    ("changes", "has_all_nodes"),
    [
        ({"guard": TDX}, True),
        ({"pci": PciLayout(hot_plug=PortKind.ROOT)}, True),
        ({"pci": PciLayout(placed=(PlacedDevice(device=VFIO, bus="b", slot=0, pci_path="01"),))}, True),
        (
            {
                "pci": PciLayout(
                    placed=(PlacedDevice(device=EmulatedDevice(id="e", model="edu"), bus="b", slot=0, pci_path="01"),)
                )
            },
            False,
        ),
    ],
    ids=["guard", "vfio later", "vfio", "emulated"],
)
def test_a_vm_whose_device_nodes_are_unknown_sees_the_hosts(changes: dict[str, Any], has_all_nodes: bool) -> None:
    found = kept(vm_config(**changes))

    assert ("/dev" in found) is has_all_nodes
    assert ("/dev/null" in found) is not has_all_nodes
    assert not has_all_nodes or not found["/dev"].is_recursive


def test_the_quoting_services_directory_is_seen() -> None:
    """It may make its socket again while the VM runs."""
    found = kept(vm_config(guard=TDX))

    assert "/var/run/tdx-qgs" in found
    assert found["/var/run/tdx-qgs"].may_lack


def test_the_vsock_program_sees_its_own_directory_and_code() -> None:
    channel = VhostUserVsockChannel(
        port=1024,
        program="/srv/programs/bin/vhost-device-vsock",
        device_path="/run/vc/vm/pod1/vsock/device.sock",
        socket_path="/run/vc/vm/pod1/vsock/vsock.sock",
    )

    found = {each.path: each for each in vsock_view(channel)}

    assert set(found) == CODE | NODES | {channel.program, "/run/vc/vm/pod1/vsock"}
    assert [each.path for each in found.values() if each.is_writable] == ["/run/vc/vm/pod1/vsock"]


@pytest.mark.parametrize(
    ("config", "is_script", "word"),
    [
        (vm_config(), False, ""),
        (vm_config(), True, "script"),
        (vm_config(is_privileged=True), False, "privileged_vmm"),
        (vm_config(opens_sockets=True), False, "vhost_user_reconnect_timeout_sec"),
    ],
    ids=["plain", "script", "privileged", "sockets"],
)
def test_each_need_of_the_hosts_files_has_its_reason(config: LocalVm, is_script: bool, word: str) -> None:
    reason = host_view_reason(config, is_script=is_script)

    assert word in reason
    assert bool(reason) is bool(word)
