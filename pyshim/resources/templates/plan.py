"""Templates: saved states of machines that have booted, from which the VMs of new pods continue.

Decides which VMs may continue from a template, and which machine each needs. Pure.
"""

import hashlib

import msgspec
from msgspec.structs import replace

from pyshim.model.confinement import NO_LABELS
from pyshim.model.vm import AgentChannel, LocalVm, SerialChannel, VhostUserVsockChannel


class MachineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The host's part in the identity of a machine; its configuration is the other part."""

    files: tuple[tuple[str, str], ...]
    """Path and identity (`host/file_answers.py`) of the VMM, the kernel, the images and the firmware."""
    cpu: str
    """The kernel's description of the host's CPU, with its microcode."""
    host_kernel: str


class Template(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a template, from the file beside it."""

    key: str
    """Machines with equal keys are equal."""
    kernel: str
    vcpus: int
    memory_mib: int
    state_bytes: int
    state_sha256: str = ""
    """Of the file `state`; empty in templates of releases before 0.2, which are made anew."""
    made_ns: int
    files: tuple[tuple[str, str], ...]
    """As in `MachineFacts`. After one of them has changed, no VM uses the template."""


class StoredTemplate(msgspec.Struct, frozen=True, kw_only=True):
    template: Template
    directory: str
    used_bytes: int
    used_ns: int
    """When it was last used; the time of its creation if it was not used."""


_KEY_CHARS = 32


def reason_to_boot(vm: LocalVm, base: LocalVm) -> str:
    """The reason why `vm` cannot continue from a template of the size of `base`; empty if it can."""
    memory = vm.memory
    is_smaller = vm.cpu.boot_vcpus < base.cpu.boot_vcpus or memory.boot_mib < base.memory.boot_mib
    is_larger = vm.cpu.boot_vcpus > base.cpu.max_vcpus or memory.boot_mib > max(
        base.memory.max_mib, base.memory.boot_mib
    )
    reasons = {
        f"{vm.machine_type} cannot be saved": not vm.machine.can_be_saved,
        "a confidential guest's memory cannot be copied": vm.guard is not None,
        "its guest reads initdata": bool(vm.initdata),
        "it has a NUMA topology of its own (enable_numa)": bool(vm.numa or memory.host_nodes),
        "its memory is set aside before it boots (enable_mem_prealloc, enable_hugepages)": memory.prealloc,
        "it boots with devices of the host": bool(vm.pci.placed),
        "it has vhost-user interfaces": bool(vm.vhost_user_nics),
        "its memory grows by virtio-mem (enable_virtio_mem)": base.memory.virtio_mem,
        "it is smaller than the template's": is_smaller,
        "it is larger than a VM can grow to": is_larger,
        "it has no bridge for what is plugged (default_bridges)": vm.bridges < 1,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def template_vm(vm: LocalVm, *, sandbox_id: str, uuid: str, vm_dir: str) -> LocalVm:
    """The VM that is saved for `vm`, and for others like it: nothing of a pod is in it."""
    return replace(
        vm,
        sandbox_id=sandbox_id,
        uuid=uuid,
        vm_dir=vm_dir,
        agent_channel=_channel(vm.agent_channel, vm_dir),
        share=None,
        nics=(),
        netns_path=None,
        in_host_netns=False,
        labels=NO_LABELS,
        is_copyable=True,
    )


def template_key(vm: LocalVm, facts: MachineFacts) -> str:
    """The same for all VMs whose machines are equal, and for no others."""
    machine = replace(
        template_vm(vm, sandbox_id="", uuid="", vm_dir=""),
        seccomp_sandbox="",
        extra_monitor="",
        debug=False,
        start_timeout_s=0.0,
        stop_timeout_s=0.0,
        is_privileged=False,
        dumps_core=False,
        first_user_id=0,
        opens_sockets=False,
    )
    return hashlib.sha256(msgspec.json.encode((machine, facts), order="deterministic")).hexdigest()[:_KEY_CHARS]


def _channel(channel: AgentChannel | None, vm_dir: str) -> AgentChannel | None:
    match channel:
        case SerialChannel():
            return replace(channel, socket_path=f"{vm_dir}/agent.sock")
        case VhostUserVsockChannel():
            return replace(channel, device_path=f"{vm_dir}/vsock/device.sock", socket_path=f"{vm_dir}/vsock/vsock.sock")
    return channel
