"""The plan of one sandbox: VM, share, cgroups, and CreateSandbox for the agent; `pod/sandbox.py` carries it out."""

import posixpath
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from pyshim.model.architecture import ARCHITECTURES, machine_types_of
from pyshim.model.confidential import Guard, Initdata
from pyshim.model.config import Config
from pyshim.model.confinement import NO_LABELS, ProcessLabels, vmm_selinux_label
from pyshim.model.devices import PodDevices
from pyshim.model.errors import FailedPrecondition, InvalidArgument
from pyshim.model.guest import AGENT_VSOCK_PORT
from pyshim.model.host_facts import Accelerator, CapacityFacts, HostFacts, unbounded
from pyshim.model.ids import SandboxId
from pyshim.model.oci import ContainerKind, OciSpec, keys_of
from pyshim.model.places import VM_ROOT
from pyshim.model.plans import SandboxPlan, SharePlan
from pyshim.model.sizing import SizingRecord
from pyshim.model.vm import (
    AgentChannel,
    BootConfig,
    CpuConfig,
    ExtensionDisk,
    ImageDriver,
    LocalVm,
    MemoryConfig,
    MemoryDump,
    PciLayout,
    SerialChannel,
    ShareDevice,
    VhostUserVsockChannel,
    VmConfig,
    VsockChannel,
)
from pyshim.model.volumes import SourceFacts
from pyshim.pod.plan.guest_sandbox import guest_sandbox, pod_sysctls
from pyshim.pod.plan.hooks import makes_network
from pyshim.pod.plan.kernel_params import SERIAL_AGENT_PORT, kernel_params
from pyshim.pod.plan.remote_vm import NO_NETNS, remote_netns_path, remote_vm
from pyshim.resources.cgroups.plan.cgroups import cgroup_plan
from pyshim.resources.confidential.plan.guard import cpu_model, guard_of
from pyshim.resources.confidential.plan.initdata import decode
from pyshim.resources.devices.plan.devices import PASSING_TIMEOUT_S, check_kind_table, device_layout, memory_nodes
from pyshim.resources.devices.plan.instances import InstanceTable, choose_type
from pyshim.resources.network.plan.network import OWN_NETNS
from pyshim.resources.sizing.plan.capacity import capacity_check, memory_backing, pods_host
from pyshim.resources.sizing.plan.static import Headroom, boot_size, headroom, is_resizable, static_size, template_size
from pyshim.resources.sizing.plan.workload import workload
from pyshim.resources.volumes.plan.disks import scsi_controller
from pyshim.resources.volumes.plan.share import SHARE_TAG, share_plan

EMULATED_BOOT_S = 60.0
"""Seconds for an emulated guest to boot if `dial_timeout` is below KVM_BOOT_S. Measured: 5 s on an idle host, above
30 s on a crowded one."""
KVM_BOOT_S = 10.0
"""A `dial_timeout` below this is meant for KVM: the files of Kata's Rust runtime say 3 s."""
_NO_DEVICES = PodDevices()


def sandbox_plan(
    *,
    sandbox_id: SandboxId,
    kind: ContainerKind,
    uuid: str,
    spec: OciSpec,
    config: Config,
    host: HostFacts,
    capacity: CapacityFacts,
    sources: Mapping[str, SourceFacts],
    devices: PodDevices = _NO_DEVICES,
    instances: InstanceTable | None = None,
    dns: tuple[str, ...] = (),
) -> SandboxPlan:
    """The plan of the sandbox of `spec`. Raises InvalidArgument or FailedPrecondition naming key and file.

    `sources` has the facts of the spec's mounts, `dns` the lines of its resolv.conf, `instances` the types of remote
    VMs.
    """
    asked = _Asked(sandbox_id, kind, uuid, spec, config, host, devices, f"{VM_ROOT}/{sandbox_id}")
    made = _remote(asked, instances) if config.is_remote else _local(asked, capacity)
    return SandboxPlan(
        sandbox_id=sandbox_id,
        kind=kind,
        config=made.config,
        vm=made.vm,
        warm_vm=made.warm_vm,
        share=made.share,
        guest=guest_sandbox(
            sandbox_id, kind, spec, config, sources, dns, host_name=host.hostname if _is_on_hosts_network(spec) else ""
        ),
        sizing=made.sizing,
        initdata=made.initdata,
        cgroups=cgroup_plan(sandbox_id=sandbox_id, cgroups_path=spec.cgroups_path, config=config, host=host),
        netns_path=made.vm.netns_path,
        new_netns=made.new_netns,
        has_network_hooks=makes_network(spec),
        devices=devices,
        sysctls=pod_sysctls(spec),
        agent_timeout_s=made.agent_timeout_s,
    )


class _Asked(NamedTuple):
    sandbox_id: SandboxId
    kind: ContainerKind
    uuid: str
    spec: OciSpec
    config: Config
    host: HostFacts
    devices: PodDevices
    vm_dir: str


class _Made(NamedTuple):
    """The part of the plan that depends on where the VM is made."""

    config: Config
    vm: VmConfig
    share: SharePlan
    sizing: SizingRecord
    agent_timeout_s: float
    warm_vm: LocalVm | None = None
    new_netns: bool = False
    initdata: Initdata | None = None


def _remote(asked: _Asked, instances: InstanceTable | None) -> _Made:
    spec, config = asked.spec, asked.config
    sizing = static_size(config, unbounded(asked.host), workload(asked.kind, spec.annotations, spec.raw))
    if instances is not None:
        config = _of_instance(config, instances, asked.devices, sizing)
    vm = remote_vm(
        sandbox_id=asked.sandbox_id,
        uuid=asked.uuid,
        vm_dir=asked.vm_dir,
        spec=spec,
        config=config,
        sizing=sizing,
        netns_path=remote_netns_path(spec),
        initdata=_initdata(config),
        devices=asked.devices,
    )
    share = share_plan(asked.sandbox_id, config, vm_dir=asked.vm_dir, labels=NO_LABELS)
    return _Made(config, vm, share, sizing, config.agent.dial_timeout_s)


def _local(asked: _Asked, capacity: CapacityFacts) -> _Made:
    spec, config, host = asked.spec, without_acpi(asked.config), pods_host(asked.host, capacity)
    _check(config)
    check_machine(config, host)
    initdata = _initdata(config)
    guard = guard_of(config, host, initdata)
    sizing = _sized(asked.kind, spec, config, host, capacity)
    _check_network(asked.kind, spec, config)
    new_netns = _makes_netns(spec, config)
    labels = _labels(spec, config)
    share = share_plan(asked.sandbox_id, config, vm_dir=asked.vm_dir, labels=labels)
    sized = partial(
        _vm,
        asked=asked,
        host=host,
        share=share,
        netns_path=f"{OWN_NETNS}{asked.sandbox_id}" if new_netns else _netns_path(spec, config),
        guard=guard,
        initdata=initdata,
        labels=labels,
    )
    vm, warm_vm = sized(config, sizing), None
    if config.factory.enable_template:
        # One for pods of every size: small at first, with room to grow.
        growing = replace(config, runtime=replace(config.runtime, static_sandbox_resource_mgmt=False))
        warm_vm = sized(growing, template_size(config, host))
    return _Made(
        config,
        vm,
        share,
        sizing,
        _agent_timeout_s(config, vm.cpu.accelerator),
        warm_vm=warm_vm,
        new_netns=new_netns,
        initdata=initdata,
    )


def _of_instance(config: Config, table: InstanceTable, devices: PodDevices, sizing: SizingRecord) -> Config:
    """`config` with the machine type that the pod's devices and size need, and with the table's kinds of devices."""
    machine_type = choose_type(
        table,
        (device.request for device in devices.devices),
        vcpus=sizing.vcpus.granted,
        memory_mib=sizing.memory_mib.granted,
        asked=config.hypervisor.machine_type,
    )
    kinds = (*table.kind_rows(), *config.runtime.vfio_device_kinds)
    return replace(
        config,
        hypervisor=replace(config.hypervisor, machine_type=machine_type),
        runtime=replace(config.runtime, vfio_device_kinds=kinds),
    )


def _agent_timeout_s(config: Config, accelerator: Accelerator) -> float:
    asked_s = config.agent.dial_timeout_s
    return EMULATED_BOOT_S if accelerator is Accelerator.TCG and asked_s < KVM_BOOT_S else asked_s


def _pci(config: Config, devices: PodDevices, guard: Guard | None) -> PciLayout:
    check_kind_table(config.runtime.vfio_device_kinds, config.source)
    shared = next((node.path for node in devices.nodes() if not node.iommufd), "")
    if guard and shared:
        raise FailedPrecondition(f"pass '{shared}' through: a confidential guest takes devices through iommufd only")
    return device_layout(config, devices)


def _sized(
    kind: ContainerKind, spec: OciSpec, config: Config, host: HostFacts, capacity: CapacityFacts
) -> SizingRecord:
    """The size at boot; a VM that follows its containers boots with the defaults."""
    size = boot_size if is_resizable(config) else static_size
    sizing = size(config, host, workload(kind, spec.annotations, spec.raw))
    return sizing.with_warnings(*capacity_check(sizing, config, host, capacity))


def _vm(
    config: Config,
    sizing: SizingRecord,
    *,
    asked: _Asked,
    host: HostFacts,
    share: SharePlan,
    netns_path: str | None,
    guard: Guard | None,
    initdata: Initdata | None,
    labels: ProcessLabels,
) -> LocalVm:
    hypervisor, devices, vm_dir = config.hypervisor, asked.devices, asked.vm_dir
    room = headroom(config, host, sizing)
    return LocalVm(
        sandbox_id=asked.sandbox_id,
        uuid=asked.uuid,
        vm_dir=vm_dir,
        hypervisor_path=hypervisor.path,
        machine_type=hypervisor.machine_type,
        machine_options=tuple(part for part in hypervisor.machine_accelerators.split(",") if part),
        boot=_boot(config, host, room),
        cpu=_cpu(config, host, sizing, room, guard),
        memory=_memory(config, sizing, room, devices),
        share=ShareDevice(
            tag=SHARE_TAG, socket_path=share.virtiofsd.listen_path, queue_size=hypervisor.virtio_fs_queue_size
        )
        if share.virtiofsd
        else None,
        agent_channel=agent_channel(config, host, vm_dir),
        nics=(),
        bridges=hypervisor.default_bridges,
        scsi=scsi_controller(config),
        # A confidential guest takes no randomness from the host.
        entropy_source="" if guard else hypervisor.entropy_source,
        guard=guard,
        initdata=f"{vm_dir}/initdata.img" if initdata else "",
        seccomp_sandbox=hypervisor.seccompsandbox,
        netns_path=netns_path,
        in_host_netns=config.runtime.disable_new_netns,
        extra_monitor=hypervisor.extra_monitor_socket or ("hmp" if hypervisor.enable_debug else ""),
        nested=host.nested and not hypervisor.disable_nesting_checks,
        debug=hypervisor.enable_debug,
        start_timeout_s=max(hypervisor.start_timeout_s, PASSING_TIMEOUT_S if devices.devices else 0.0),
        pci=_pci(config, devices, guard),
        is_privileged=hypervisor.privileged_vmm,
        labels=labels,
        dumps_core=hypervisor.enable_core_dumps,
        memory_dump=MemoryDump(directory=hypervisor.guest_memory_dump_path, paging=hypervisor.guest_memory_dump_paging)
        if hypervisor.guest_memory_dump_path
        else None,
        first_user_id=hypervisor.rootless_first_id if hypervisor.rootless else 0,
        opens_sockets=hypervisor.enable_vhost_user_store and hypervisor.vhost_user_reconnect_timeout_s > 0,
        extensions=tuple(
            ExtensionDisk(name=image["name"], path=image["path"]) for image in hypervisor.guest_extension_images
        ),
    )


def accelerator(config: Config, host: HostFacts) -> Accelerator:
    """`auto` is kvm if it is usable, else tcg. Raises FailedPrecondition if kvm is configured and not usable."""
    wanted = config.hypervisor.accelerator
    if wanted == "kvm" and not host.kvm_usable:
        raise FailedPrecondition(f"start vm: accelerator \"kvm\" in '{config.source}': {host.kvm_reason}")
    return Accelerator.KVM if host.kvm_usable and wanted != "tcg" else Accelerator.TCG


def check_machine(config: Config, host: HostFacts) -> None:
    """Raises FailedPrecondition for a machine of another processor than the host's, unless it is to be emulated."""
    hypervisor = config.hypervisor
    wanted, present = hypervisor.machine.architecture, host.architecture
    if wanted.name != present and hypervisor.accelerator != "tcg":
        own = " and ".join(machine_types_of(ARCHITECTURES[present])) if present in ARCHITECTURES else "none"
        raise FailedPrecondition(
            f'start vm: machine_type "{hypervisor.machine_type}" in {config.origin("machine_type")} is of'
            f" {wanted.name}, and this host's processor is {present}, with {own}"
            ' (hint: accelerator = "tcg" emulates the other processor)'
        )
    program = posixpath.basename(hypervisor.path)
    others = {posixpath.basename(path) for each in ARCHITECTURES.values() for path in each.qemu_paths}
    if program in others - {posixpath.basename(path) for path in wanted.qemu_paths}:
        raise InvalidArgument(
            f"start vm: path '{hypervisor.path}' in {config.origin('path')}: {program} has no machine type"
            f' "{hypervisor.machine_type}", which is of {wanted.name}'
        )


def without_acpi(config: Config) -> Config:
    """`config` for a guest that finds no ACPI: memory grows by virtio-mem, not by DIMMs, and the root is a disk."""
    hypervisor = config.hypervisor
    if not hypervisor.machine.needs_uefi_for_acpi or hypervisor.firmware:
        return config
    return replace(config, hypervisor=replace(hypervisor, enable_virtio_mem=True, disable_image_nvdimm=True))


def agent_channel(config: Config, host: HostFacts, vm_dir: str) -> AgentChannel:
    """As `agent_channel` says; `auto` is vhost-vsock if the host has it, else a virtio-serial port."""
    wanted = config.hypervisor.agent_channel
    if wanted == "vhost-user":
        return VhostUserVsockChannel(
            port=AGENT_VSOCK_PORT,
            program=config.hypervisor.vhost_user_vsock_daemon,
            device_path=f"{vm_dir}/vsock/device.sock",
            socket_path=f"{vm_dir}/vsock/vsock.sock",
        )
    if wanted == "vhost-vsock" and not host.vhost_vsock:
        asked = f"agent_channel \"vhost-vsock\" in '{config.source}'"
        raise FailedPrecondition(f"start vm: {asked}: /dev/vhost-vsock cannot be opened")
    if wanted == "vhost-vsock" or (wanted == "auto" and host.vhost_vsock):
        return VsockChannel(port=AGENT_VSOCK_PORT)
    return SerialChannel(port_name=SERIAL_AGENT_PORT, socket_path=f"{vm_dir}/agent.sock")


def _check(config: Config) -> None:
    hypervisor = config.hypervisor
    for key, value in (("path", hypervisor.path), ("kernel", hypervisor.kernel)):
        if not value.startswith("/"):
            raise InvalidArgument(f"read {key} in {config.origin(key)}: {value!r} is not an absolute path")
    if not hypervisor.image and not hypervisor.initrd:
        raise InvalidArgument(f"read '{config.source}': neither image nor initrd is set: the guest has no root")
    if hypervisor.enable_iommu and not hypervisor.machine.has_iommu:
        raise InvalidArgument(
            f"read enable_iommu in {config.origin('enable_iommu')}: {hypervisor.machine_type} has no IOMMU"
        )


def _initdata(config: Config) -> Initdata | None:
    if not config.hypervisor.initdata:
        return None

    return decode(config.hypervisor.initdata, f"cc_init_data, or initdata in '{config.source}'")


def _labels(spec: OciSpec, config: Config) -> ProcessLabels:
    hypervisor = config.hypervisor
    text = "" if hypervisor.disable_selinux else spec.selinux_label
    return ProcessLabels(vmm_selinux_label(text, hypervisor.selinux_vmm_type), hypervisor.apparmor_profile)


def _boot(config: Config, host: HostFacts, room: Headroom) -> BootConfig:
    hypervisor = config.hypervisor
    use_pmem = (
        bool(hypervisor.image)
        and not hypervisor.disable_image_nvdimm
        and not hypervisor.confidential_guest
        and hypervisor.machine.is_pci
    )
    serial = isinstance(agent_channel(config, host, ""), SerialChannel)
    return BootConfig(
        kernel=hypervisor.kernel,
        kernel_params=kernel_params(
            config,
            max_vcpus=room.max_vcpus,
            root_on_pmem=use_pmem,
            serial_agent=serial,
            emulated=accelerator(config, host) is Accelerator.TCG,
            tsc_khz=host.tsc_khz,
        ),
        initrd=hypervisor.initrd or None,
        image=hypervisor.image or None,
        image_driver=ImageDriver.PMEM if use_pmem else ImageDriver.VIRTIO_BLK,
        firmware=hypervisor.firmware or None,
    )


def _cpu(config: Config, host: HostFacts, sizing: SizingRecord, room: Headroom, guard: Guard | None) -> CpuConfig:
    hypervisor = config.hypervisor
    chosen = accelerator(config, host)
    usual = (
        cpu_model(guard)
        if guard
        else "host"
        if chosen is Accelerator.KVM
        else hypervisor.machine.architecture.emulated_cpu
    )
    model = hypervisor.cpu_model or usual
    features = hypervisor.cpu_features if chosen is Accelerator.KVM else ""
    return CpuConfig(
        accelerator=chosen,
        model=f"{model},{features}" if features else model,
        boot_vcpus=sizing.vcpus.granted,
        max_vcpus=room.max_vcpus,
    )


def _memory(config: Config, sizing: SizingRecord, room: Headroom, devices: PodDevices) -> MemoryConfig:
    hypervisor = config.hypervisor
    return MemoryConfig(
        boot_mib=sizing.memory_mib.granted,
        max_mib=room.max_memory_mib,
        slots=room.memory_slots,
        backing=memory_backing(hypervisor),
        prealloc=hypervisor.enable_mem_prealloc or hypervisor.enable_hugepages,
        virtio_mem=hypervisor.enable_virtio_mem and is_resizable(config),
        reclaim=hypervisor.reclaim_guest_freed_memory,
        host_nodes=memory_nodes(devices),
    )


def _check_network(kind: ContainerKind, spec: OciSpec, config: Config) -> None:
    """Raises InvalidArgument for a pod on the host's network, which could not be reached in a VM."""
    asked = "hostNetwork is true" if kind is ContainerKind.POD_SANDBOX else "the spec is for the host's network"
    if _is_on_hosts_network(spec) and not config.runtime.allow_host_network:
        raise InvalidArgument(
            f"start sandbox: {asked}, and a VM cannot have the host's network"
            f" (hint: allow_host_network = true in '{config.source}' starts such pods with a loopback only)"
        )


def _is_on_hosts_network(spec: OciSpec) -> bool:
    return spec.annotations.get(keys_of(spec.annotations).host_network) == "true" or spec.is_in_hosts("network")


def _makes_netns(spec: OciSpec, config: Config) -> bool:
    """The spec asks for a new namespace. Hooks add interfaces to it, or the caller does after Create."""
    return not config.runtime.disable_new_netns and spec.namespace_path("network") in ("", NO_NETNS)


def _netns_path(spec: OciSpec, config: Config) -> str | None:
    """The namespace that CNI prepared; None for a pod that stays in the host's."""
    path = spec.namespace_path("network")
    if not path or config.runtime.disable_new_netns or path == NO_NETNS or _is_on_hosts_network(spec):
        return None
    return path
