"""VmConfigs for tests: one plain q35 VM, and whatever a test changes in it."""

from pathlib import Path
from typing import Any
from uuid import uuid4

from msgspec.structs import replace

from pyshim.model.host_facts import Accelerator
from pyshim.model.remote_vms import RemoteServiceConfig
from pyshim.model.vm import (
    BootConfig,
    CpuConfig,
    ImageDriver,
    LocalVm,
    MemoryBacking,
    MemoryConfig,
    MemorySize,
    NicDevice,
    RemoteVm,
    SerialChannel,
    ShareDevice,
    VcpuCount,
)
from tests.fakes.tiny_kernel import bzimage

UUID = "6f9619ff-8b86-4011-b42d-00c04fc964ff"
OURS = str(uuid4())
"""For VMs that really run: a VMM without a recorded pid is found, and killed, by it; it is no other run's."""


def vm_config(**changes: Any) -> LocalVm:
    """A q35 VM under TCG with virtio-fs, a root image with its loader, and the agent on a serial port."""
    vm_dir = changes.get("vm_dir", "/run/vc/vm/pod1")
    config = LocalVm(
        sandbox_id="pod1",
        uuid=UUID,
        vm_dir=vm_dir,
        hypervisor_path="/usr/bin/qemu-system-x86_64",
        machine_type="q35",
        machine_options=(),
        boot=BootConfig(
            kernel="/opt/guest/vmlinuz",
            kernel_params=("console=hvc0", "panic=1", "root=/dev/vda"),
            initrd="/opt/guest/initrd.img",
            image="/opt/guest/rootfs.img",
            image_driver=ImageDriver.VIRTIO_BLK,
            firmware=None,
        ),
        cpu=CpuConfig(accelerator=Accelerator.TCG, model="max", boot_vcpus=1, max_vcpus=2),
        memory=MemoryConfig(
            boot_mib=256, max_mib=1024, slots=4, backing=MemoryBacking.SHARED_MEMFD, prealloc=False, virtio_mem=False
        ),
        share=ShareDevice(tag="kataShared", socket_path=f"{vm_dir}/vhost-fs.sock", queue_size=1024),
        agent_channel=SerialChannel(port_name="org.pykata.agent.0", socket_path=f"{vm_dir}/agent.sock"),
        nics=(),
        bridges=1,
        scsi=None,
        entropy_source="/dev/urandom",
        guard=None,
        initdata="",
        seccomp_sandbox="on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
        netns_path=None,
        extra_monitor="",
        nested=False,
        debug=False,
        start_timeout_s=30.0,
    )
    return replace(config, **changes)


def remote_vm_config(service: RemoteServiceConfig, **changes: Any) -> RemoteVm:
    """A VM of one vCPU that `service` makes."""
    config = RemoteVm(
        sandbox_id="pod1",
        uuid=UUID,
        vm_dir="/run/vc/vm/pod1",
        machine_type="",
        cpu=VcpuCount(boot_vcpus=1, max_vcpus=1),
        memory=MemorySize(boot_mib=256, max_mib=256),
        netns_path=None,
        service=service,
        start_timeout_s=30.0,
        stop_timeout_s=10.0,
    )
    return replace(config, **changes)


def nic(index: int, *, taps: tuple[int, ...], vhosts: tuple[int, ...] = (), mtu: int = 1500) -> NicDevice:
    return NicDevice(id=f"net{index}", mac=f"02:00:ca:fe:00:{index:02x}", tap_fds=taps, vhost_fds=vhosts, mtu=mtu)


def bootable(directory: Path, code: str, **changes: Any) -> LocalVm:
    """A VM that boots `code` (see tiny_kernel.py), with nothing but a kernel and a dummy initrd, all in `directory`."""
    kernel, initrd = directory / "kernel", directory / "initrd"
    kernel.write_bytes(bzimage(code))
    initrd.write_bytes(b"no initrd")
    config = vm_config(**{"vm_dir": str(directory / "vm"), "share": None, "uuid": OURS, **changes})
    return replace(config, boot=replace(config.boot, kernel=str(kernel), initrd=str(initrd), image=None))


def with_boot(config: LocalVm, **changes: Any) -> LocalVm:
    return replace(config, boot=replace(config.boot, **changes))


def with_memory(config: LocalVm, **changes: Any) -> LocalVm:
    return replace(config, memory=replace(config.memory, **changes))
