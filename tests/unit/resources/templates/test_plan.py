"""Which VMs may continue from a template, and which of them share one."""

from typing import Any

import pytest
from msgspec.structs import replace

from pyshim.model.confidential import SevGuard
from pyshim.model.confinement import ProcessLabels
from pyshim.model.vm import (
    AgentChannel,
    EmulatedDevice,
    GuestNode,
    LocalVm,
    PciLayout,
    PlacedDevice,
    VhostUserNic,
    VhostUserVsockChannel,
    VsockChannel,
)
from pyshim.resources.templates.plan import MachineFacts, reason_to_boot, template_key, template_vm
from tests.fakes.vm_config import nic, vm_config, with_boot, with_memory

FACTS = MachineFacts(files=(("/k", "1-2"),), cpu="model name: x", host_kernel="6.1")
BASE = vm_config()
LARGER = replace(with_memory(vm_config(), boot_mib=512), cpu=replace(BASE.cpu, boot_vcpus=2))
PROGRAM = VhostUserVsockChannel(
    port=1024, program="/p", device_path="/run/vc/vm/pod1/device.sock", socket_path="/run/vc/vm/pod1/vsock.sock"
)
NODE = GuestNode(vcpus=(0,), memory_mib=256, distances=(10,), memory_nodes=(), cpus=())
PLACED = PlacedDevice(device=EmulatedDevice(id="e", model="edu"), bus="rp0", slot=0, pci_path="02")
USER_NIC = VhostUserNic(id="n", mac="02:00:00:00:00:01", socket_path="/s", queues=1, queue_size=0, mtu=1500)


def test_an_ordinary_vm_may_continue_whatever_its_pod_brings() -> None:
    over_vsock = vm_config(nics=(nic(0, taps=(1,)),), agent_channel=VsockChannel(port=1024))
    for vm in (vm_config(), over_vsock, vm_config(agent_channel=PROGRAM), LARGER):
        assert reason_to_boot(vm, BASE) == ""


@pytest.mark.parametrize(
    ("vm", "reason"),
    [
        (vm_config(machine_type="microvm"), "microvm cannot be saved"),
        (vm_config(guard=SevGuard(policy=0, launch_hook="")), "memory cannot be copied"),
        (vm_config(initdata="/initdata.img"), "initdata"),
        (vm_config(numa=(NODE,)), "enable_numa"),
        (with_memory(vm_config(), host_nodes=(0,)), "enable_numa"),
        (with_memory(vm_config(), prealloc=True), "enable_mem_prealloc"),
        (vm_config(pci=PciLayout(placed=(PLACED,))), "devices of the host"),
        (vm_config(vhost_user_nics=(USER_NIC,)), "vhost-user interfaces"),
        (vm_config(bridges=0), "default_bridges"),
        (with_memory(vm_config(), boot_mib=128), "smaller than the template's"),
        (with_memory(vm_config(), boot_mib=4096), "larger than a VM can grow to"),
        (replace(vm_config(), cpu=replace(BASE.cpu, boot_vcpus=8)), "larger than a VM can grow to"),
    ],
)
def test_a_vm_that_has_to_boot_says_why(vm: LocalVm, reason: str) -> None:
    assert reason in reason_to_boot(vm, BASE)


def test_a_vm_that_grows_by_virtio_mem_has_to_boot() -> None:
    assert "virtio-mem" in reason_to_boot(vm_config(), with_memory(vm_config(), virtio_mem=True))


@pytest.mark.parametrize(
    "changes",
    [
        {"sandbox_id": "other", "uuid": "u", "vm_dir": "/run/vc/vm/other"},
        {"share": None},
        {"nics": (nic(0, taps=(5,)),)},
        {"netns_path": "/run/netns/x"},
        {"first_user_id": 100_000},
        {"start_timeout_s": 5.0},
        {"labels": ProcessLabels(apparmor="pod", selinux="")},
    ],
)
def test_what_a_pod_brings_leaves_the_key_as_it_is(changes: dict[str, Any]) -> None:
    one, other = vm_config(), replace(vm_config(), **changes)

    assert template_key(one, FACTS) == template_key(other, FACTS)


@pytest.mark.parametrize(
    "other",
    [
        vm_config(machine_options=("smm=off",)),
        vm_config(bridges=2),
        vm_config(agent_channel=VsockChannel(port=1024)),
        vm_config(entropy_source="/dev/random"),
        with_boot(vm_config(), kernel_params=("quiet",)),
        with_memory(vm_config(), boot_mib=512),
        with_memory(vm_config(), max_mib=2048),
        replace(vm_config(), cpu=replace(vm_config().cpu, model="host")),
        replace(vm_config(), cpu=replace(vm_config().cpu, boot_vcpus=2)),
    ],
)
def test_what_shapes_the_machine_is_in_the_key(other: LocalVm) -> None:
    assert template_key(vm_config(), FACTS) != template_key(other, FACTS)


@pytest.mark.parametrize(
    "facts",
    [replace(FACTS, files=(("/k", "1-3"),)), replace(FACTS, cpu="model name: y"), replace(FACTS, host_kernel="6.2")],
)
def test_what_of_the_host_shapes_the_machine_is_in_the_key(facts: MachineFacts) -> None:
    assert template_key(vm_config(), FACTS) != template_key(vm_config(), facts)


@pytest.mark.parametrize("channel", [vm_config().agent_channel, PROGRAM])
def test_nothing_of_a_pod_is_in_a_template(channel: AgentChannel) -> None:
    vm = replace(vm_config(agent_channel=channel), nics=(nic(0, taps=(5,)),), netns_path="/run/netns/x")

    made = template_vm(vm, sandbox_id="t", uuid="u", vm_dir="/t")

    assert (made.share, made.nics, made.netns_path, made.vm_dir) == (None, (), None, "/t")
    assert made.has_empty_netns
    assert made.is_copyable
    assert "/run/vc/vm/pod1" not in str(made)
