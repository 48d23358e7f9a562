"""Builds QEMU's argv from a LocalVm. Pure and deterministic."""

import itertools

import msgspec

from hypervisors.qemu import devices, disks, guards, memory, pci
from hypervisors.qemu.guards import NO_ENCRYPTION, Encryption
from hypervisors.qemu.options import option
from pyshim.model.errors import InvalidArgument
from pyshim.model.places import VMM_NAME
from pyshim.model.vm import LocalVm, SerialChannel, VhostUserVsockChannel

# Numbers of the descriptors that QEMU inherits.
QMP_FD = 3
"""A listening socket."""
CONSOLE_FD, SERIAL_FD = 4, 5
"""Connected sockets."""
AGENT_FD = 6
"""A listening socket (serial port), the open vhost-vsock device, or a connected socket (vhost-user-vsock)."""
MONITOR_FD = 7
"""A listening socket; only with `extra_monitor`."""
MEMORY_FD = 8
"""The file with the guest's memory; only with `is_copyable`."""
_FIRST_NIC_FD = 9
MAX_KERNEL_COMMAND_LINE = 2047
"""COMMAND_LINE_SIZE of x86 and arm64 without the final NUL. The kernel cuts a longer line without a message."""


class NicFds(msgspec.Struct, frozen=True, kw_only=True):
    """One NIC's descriptor numbers in QEMU, in the order of its queues."""

    vhosts: tuple[int, ...]
    taps: tuple[int, ...]


def nic_fds(config: LocalVm) -> tuple[NicFds, ...]:
    """The descriptor numbers of each NIC of `config.nics`."""
    numbers = itertools.count(_FIRST_NIC_FD)
    return tuple(
        NicFds(vhosts=tuple(next(numbers) for _ in nic.vhost_fds), taps=tuple(next(numbers) for _ in nic.tap_fds))
        for nic in config.nics
    )


def can_hotplug(config: LocalVm) -> bool:
    """A machine without PCI takes no devices while it runs, and cannot grow."""
    return config.machine.is_pci


def check_config(config: LocalVm) -> None:
    """Raises InvalidArgument for what QEMU would accept without effect, or refuse without naming the cause.

    Machine, boot files, size, memory and channel of a plan fit together: the configuration and the planner see to that.
    """
    problem = ""
    if config.memory_dump is not None and not config.machine.panic_device:
        problem = f"{config.machine_type} has no pvpanic, so that a dump of the guest's memory would never begin"
    elif config.guard is not None:
        problem = guards.problem(config, config.guard)
    if problem:
        raise InvalidArgument(f"configure vm {config.sandbox_id!r}: {problem}")
    pci.check_layout(config)
    kernel_command_line(config.boot.kernel_params)


def kernel_command_line(params: tuple[str, ...]) -> str:
    """One line. A parameter with blanks is quoted in the kernel's way: `key="a b"`.

    Raises InvalidArgument for a line that is too long, and for a parameter that cannot be quoted: the kernel has no
    escape for a quote. Source: the kernel's lib/cmdline.c, next_arg.
    """
    line = " ".join(_kernel_word(param) for param in params)
    if len(line.encode()) > MAX_KERNEL_COMMAND_LINE:
        raise InvalidArgument(
            f"build kernel command line: {len(line.encode())} bytes, at most {MAX_KERNEL_COMMAND_LINE}"
        )
    return line


def _kernel_word(param: str) -> str:
    has_control = not param.isprintable() and any(ord(char) < 0x20 and char != "\t" for char in param)
    if has_control or param.count('"') % 2:
        raise InvalidArgument(
            f"build kernel command line: parameter {param!r} has a control character or an open quote"
        )
    if not _has_blank(_outside_quotes(param)):
        return param
    if '"' in param:
        raise InvalidArgument(f"build kernel command line: parameter {param!r} mixes quotes and blanks")
    key, equals, value = param.partition("=")
    return f'{key}="{value}"' if equals and not _has_blank(key) else f'"{param}"'


def _has_blank(text: str) -> bool:
    return bool(text) and text.split() != [text]


def _outside_quotes(text: str) -> str:
    return "".join(text.split('"')[::2])


def qemu_argv(
    config: LocalVm,
    *,
    guest_cid: int,
    image_bytes: int,
    memory_is_saved: bool = False,
    encryption: Encryption = NO_ENCRYPTION,
) -> tuple[str, ...]:
    """The argv of a QEMU that pauses the guest before its first instruction.

    `guest_cid`: 0 without vhost-vsock. `image_bytes`: the size of the root image, 0 without one. `memory_is_saved`:
    MEMORY_FD is the saved machine's file, which QEMU only reads. `encryption`: the host's, for SEV and SNP guests.
    """
    bus = devices.bus_of(config)
    hotplug = can_hotplug(config)
    pmem_bytes = image_bytes if devices.is_image_pmem(config) else 0
    args: list[str] = [config.hypervisor_path]
    args += ("-name", option(f"{VMM_NAME}{config.sandbox_id}", {"debug-threads": True} if config.debug else {}))
    args += ("-uuid", config.uuid)
    guarded = guards.machine_properties(config.guard) if config.guard else {}
    args += devices.machine(config, pci.machine_properties(config.pci) | guarded)
    if config.guard is not None:
        args += guards.guard_object(config.guard, encryption)
    args += ("-cpu", config.cpu.model)
    args += devices.cpus(config.cpu, hotplug=hotplug)
    args += memory.size(config.memory, hotplug=hotplug, pmem_bytes=pmem_bytes)
    if config.is_copyable:
        args += memory.ram_in_file(config.memory, MEMORY_FD, is_saved=memory_is_saved)
    else:
        args += memory.numa(config.memory, config.numa) if config.numa else memory.ram(config.memory)
    args += ("-no-user-config", "-nodefaults", "-display", "none", "-vga", "none", "-no-reboot", "-S")
    if config.memory_dump is not None:
        args += ("-action", "panic=pause")
    args += config.machine.options
    args += devices.qmp(QMP_FD)
    if config.extra_monitor:
        args += devices.extra_monitor(config.extra_monitor, MONITOR_FD)
    args += _devices(config, bus, guest_cid=guest_cid, image_bytes=image_bytes)
    args += _boot(config)
    if config.saved_machine:
        args += ("-incoming", "defer")
    if config.seccomp_sandbox:
        args += ("-sandbox", config.seccomp_sandbox)
    return tuple(args)


def _devices(config: LocalVm, bus: devices.Bus, *, guest_cid: int, image_bytes: int) -> list[str]:
    hotplug = can_hotplug(config)
    args: list[str] = [*pci.iommu(config.pci)]
    if hotplug:
        # Bridges first: they have fixed slots; QEMU gives the devices after them the free ones.
        for index in range(config.bridges):
            args += devices.bridge(index, config.machine, has_firmware=config.boot.firmware is not None)
        args += pci.ports(config.pci)
        if memory.virtio_mem_mib(config.memory):
            args += memory.virtio_mem(config.memory)
    args += devices.console(bus, hvc_fd=CONSOLE_FD, serial_fd=SERIAL_FD)
    if config.boot.image is not None:
        args += devices.root_image(config.boot.image, config.boot.image_driver, bus, image_bytes=image_bytes)
    if config.machine.panic_device:
        args += ("-device", config.machine.panic_device)
    if config.initdata:
        args += devices.initdata(config.initdata, bus)
    for extension in config.extensions:
        args += devices.extension(extension, bus)
    if config.entropy_source:
        args += devices.entropy(config.entropy_source, bus)
    if config.memory.reclaim:
        args += devices.balloon(bus)
    assert config.agent_channel is not None, "only a remote VM has no channel"
    args += devices.agent_channel(config.agent_channel, bus, fd=AGENT_FD, guest_cid=guest_cid)
    if isinstance(config.agent_channel, VhostUserVsockChannel) and not config.saved_machine:
        driver, fields = devices.vhost_user_vsock(config)
        place = {"bus": devices.bridge_id(0), "addr": "0x1"} if config.is_copyable else {}
        args += ("-device", option(driver, {"id": devices.VSOCK_ID, **fields, **place}))
    if config.is_copyable:
        args += devices.generation_id()
    if config.share is not None and not config.saved_machine:
        args += devices.share(config.share, bus)
    for nic, numbers in zip(config.nics, nic_fds(config), strict=True):
        args += devices.nic(nic, bus, tap_fds=numbers.taps, vhost_fds=numbers.vhosts)
    for vhost_user in config.vhost_user_nics:
        args += devices.vhost_user_nic(vhost_user, bus, config.cpu.accelerator)
    if hotplug and config.scsi is not None:
        args += disks.scsi_controller(config.scsi)
    for placed in config.pci.placed:
        args += pci.placed_device(placed)
    return args


def _boot(config: LocalVm) -> list[str]:
    args = ["-kernel", config.boot.kernel]
    if config.boot.initrd is not None:
        args += ("-initrd", config.boot.initrd)
    args += ("-append", kernel_command_line(config.boot.kernel_params))
    if config.boot.firmware is not None and config.guard is not None:
        args += guards.firmware(config.guard, config.boot.firmware)
    elif firmware := config.boot.firmware or config.machine.own_firmware:
        args += ("-bios", firmware)
    return args


def socket_paths(config: LocalVm) -> tuple[str, ...]:
    """The paths of all Unix sockets that the driver, QEMU or the vsock program makes for this VM."""
    paths = [qmp_path(config)]
    match config.agent_channel:
        case SerialChannel(socket_path=path):
            paths.append(path)
        case VhostUserVsockChannel(device_path=device, socket_path=path):
            paths += (device, path)
    if config.extra_monitor:
        paths.append(extra_monitor_path(config))
    return tuple(paths)


def qmp_path(config: LocalVm) -> str:
    return f"{config.vm_dir}/qmp.sock"


def extra_monitor_path(config: LocalVm) -> str:
    return f"{config.vm_dir}/extra-monitor.sock"
