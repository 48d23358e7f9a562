"""The QEMU options of the machine and its devices, one function for each; `cmdline.py` puts them in order. Pure."""

from collections.abc import Mapping

import msgspec

from hypervisors.qemu.memory import RAM_ID
from hypervisors.qemu.options import Args, Fields, chardev_id, netdev_id, option, qdev_id
from pyshim.model.architecture import MachineType
from pyshim.model.host_facts import Accelerator
from pyshim.model.places import QMP_CHARDEV
from pyshim.model.vm import (
    FIRST_BRIDGE_SLOT,
    AgentChannel,
    CpuConfig,
    ExtensionDisk,
    ImageDriver,
    LocalVm,
    NicDevice,
    SerialChannel,
    ShareDevice,
    VhostUserNic,
    VhostUserVsockChannel,
    VsockChannel,
)

IMAGE_NODE = "image0"
INITDATA_NODE = "initdata"
ROOT_BUS = "pcie.0"
_BRIDGE_PORT_CHASSIS = 16
"""Chassis number of the first bridge's root port, as in Kata; other ports have the chassis 0 to 2."""
_SWITCH_CHASSIS = 32
"""Chassis number of the ports of the first bridge that is a switch."""
SERIAL_PORTS = 2
"""The ports of the console and of the agent. QEMU's default is 31; each costs two queues in the guest's memory, set up
when its driver is loaded, and a descriptor of QEMU."""
VSOCK_ID = "vsock0"
AGENT_PORT_ID = "agent-port0"
_VSOCK_CHARDEV = "vsock-program0"


class Bus(msgspec.Struct, frozen=True, kw_only=True):
    """The bus of virtio devices: PCI, or memory-mapped on microvm."""

    is_pci: bool
    disable_modern: bool
    """The argv's transitional devices use legacy virtio: nested under KVM, port I/O exits cost less (Kata's rule)."""

    def virtio(self, name: str, *, is_transitional: bool = False) -> str:
        """QEMU's name of the virtio device. `is_transitional`: the device also speaks the legacy protocol."""
        device = f"{name}-pci" if self.is_pci else f"{name}-device"
        return f"{device},disable-modern=true" if self.disable_modern and is_transitional else device


def bus_of(config: LocalVm) -> Bus:
    is_pci = config.machine.is_pci
    nested_kvm = config.nested and config.cpu.accelerator is Accelerator.KVM
    # A confidential guest cannot use the legacy protocol, which cannot mark memory that the host may read.
    return Bus(is_pci=is_pci, disable_modern=is_pci and nested_kvm and config.guard is None)


def is_image_pmem(config: LocalVm) -> bool:
    return config.boot.image is not None and config.boot.image_driver is ImageDriver.PMEM


def machine(config: LocalVm, more: Mapping[str, str]) -> Args:
    """-machine with the properties of every VM and `more`.

    `mem-merge=off`, for hot-plugged memory too, keeps KSM from merging a guest's pages with equal ones of other
    processes: the time of a write to a merged page reveals the content of another pod's memory. QEMU's default is on.
    `dump-guest-core` is on only if the configuration wants the guest's memory in a core of QEMU. The configuration's
    `machine_accelerators` come last and win.
    """
    fields: dict[str, str | bool] = {"accel": str(config.cpu.accelerator), "mem-merge": False}
    fields |= {"dump-guest-core": config.dumps_core, **more}
    fields |= config.machine.properties
    if is_image_pmem(config):
        fields["nvdimm"] = True
    # NUMA nodes have memory backends of their own; QEMU refuses those beside one of the machine.
    ram_fields: dict[str, str | bool] = {} if config.numa else {"memory-backend": RAM_ID}
    text = option(config.machine_type, fields | ram_fields)
    return ("-machine", ",".join((text, *config.machine_options)))


def cpus(cpu: CpuConfig, *, hotplug: bool) -> Args:
    """-smp with one socket per CPU, so that QEMU's CPU ids differ in the socket alone."""
    most = max(cpu.max_vcpus, cpu.boot_vcpus) if hotplug else cpu.boot_vcpus
    return ("-smp", option(str(cpu.boot_vcpus), {"cores": 1, "threads": 1, "sockets": most, "maxcpus": most}))


def qmp(fd: int) -> Args:
    return _monitor(QMP_CHARDEV, fd, "control")


def extra_monitor(kind: str, fd: int) -> Args:
    """A second monitor, for people: the shim is the only client of the first."""
    modes = {"hmp": "readline", "qmp": "control", "qmp-pretty": "control,pretty=on"}
    return _monitor("monitor1", fd, modes[kind])


def _monitor(chardev: str, fd: int, mode: str) -> Args:
    socket = option("socket", {"id": chardev, "fd": fd, "server": True, "wait": False})
    return ("-chardev", socket, "-mon", f"chardev={chardev},mode={mode}")


def bridge(index: int, machine_type: MachineType, *, has_firmware: bool) -> Args:
    """A bridge for hotplug at slot FIRST_BRIDGE_SLOT + index: pcie.0 takes no device while the VM runs.

    OVMF reserves a window behind a PCIe root port that states its size, but not behind a bridge on the root bus. So
    with firmware the bridge is behind a root port, with Kata's properties. Without ACPI's hotplug the bridge is a PCIe
    switch, which has a port for each device.
    """
    if not machine_type.has_acpi_bridges:
        return _switch(index, machine_type)
    addr = f"{FIRST_BRIDGE_SLOT + index:#x}"
    window: Fields = {"io-reserve": "4k", "mem-reserve": "1m", "pref64-reserve": "1m"}
    if not has_firmware:
        bridge: Fields = {"bus": ROOT_BUS, "id": bridge_id(index), "chassis_nr": index + 1, "shpc": False, "addr": addr}
        return ("-device", option("pci-bridge", bridge | window))
    port = f"rp-{bridge_id(index)}"
    root_port: Fields = {"bus": ROOT_BUS, "id": port, "chassis": _BRIDGE_PORT_CHASSIS + index, "slot": 0, "addr": addr}
    return (
        "-device",
        option("pcie-root-port", root_port | {"multifunction": False, "bus-reserve": 1} | window),
        "-device",
        option("pcie-pci-bridge", {"bus": port, "id": bridge_id(index), "addr": "0x0"}),
    )


def _switch(index: int, machine_type: MachineType) -> Args:
    bridge, up = bridge_id(index), f"up-{bridge_id(index)}"
    addr = f"{FIRST_BRIDGE_SLOT + index:#x}"
    root_port: Fields = {"bus": ROOT_BUS, "id": f"rp-{bridge}", "chassis": _BRIDGE_PORT_CHASSIS + index, "slot": 0}
    args = ["-device", option("pcie-root-port", {**root_port, "addr": addr, "io-reserve": 0})]
    args += ("-device", option("x3130-upstream", {"bus": f"rp-{bridge}", "id": up}))
    for slot in range(1, machine_type.bridge_slots + 1):
        port: Fields = {"bus": up, "id": machine_type.place_behind(index, slot)[0], "addr": f"{slot:#x}"}
        args += ("-device", option("xio3130-downstream", {**port, "chassis": _SWITCH_CHASSIS + index, "slot": slot}))
    return tuple(args)


def bridge_id(index: int) -> str:
    return f"pci-bridge-{index}"


def console(bus: Bus, *, hvc_fd: int, serial_fd: int) -> Args:
    """hvc0 and the machine's serial port, each on a connected socket. The port shows the output of a kernel without its
    virtio driver yet.
    """
    return (
        "-device",
        option(bus.virtio("virtio-serial", is_transitional=True), {"id": "serial0", "max_ports": SERIAL_PORTS}),
        "-chardev",
        option("socket", {"id": "hvc0", "fd": hvc_fd}),
        "-device",
        "virtconsole,chardev=hvc0,id=console0",
        "-chardev",
        option("socket", {"id": "tty0", "fd": serial_fd}),
        "-serial",
        "chardev:tty0",
    )


def agent_channel(channel: AgentChannel, bus: Bus, *, fd: int, guest_cid: int) -> Args:
    """The agent's channel over `fd`: the vhost-vsock device that has the CID, the listening socket of the serial port,
    or the connection to the vsock program. The device of the last is `vhost_user_vsock`.
    """
    match channel:
        case VsockChannel():
            return (
                "-device",
                option(bus.virtio("vhost-vsock"), {"id": VSOCK_ID, "vhostfd": fd, "guest-cid": guest_cid}),
            )
        case VhostUserVsockChannel():
            return ("-chardev", option("socket", {"id": _VSOCK_CHARDEV, "fd": fd}))
        case SerialChannel(port_name=name):
            return (
                "-chardev",
                option("socket", {"id": "agent0", "fd": fd, "server": True, "wait": False}),
                "-device",
                option("virtserialport", {"chardev": "agent0", "id": AGENT_PORT_ID, "name": name}),
            )


def vhost_user_vsock(config: LocalVm) -> tuple[str, Fields]:
    """(QEMU's driver, fields) of the vsock device that a program serves.

    No QEMU can save this device. A copyable VM has it behind a bridge: it is unplugged before the machine is saved, and
    each copy gets one.
    """
    bus = bus_of(config)
    fields: Fields = {"chardev": _VSOCK_CHARDEV, **_vectors(bus, config.cpu.accelerator)}
    return bus.virtio("vhost-user-vsock"), fields


def vsock_path(bus: Bus) -> str:
    """The path of the vsock program's virtio device in QEMU's object model."""
    return f"/machine/peripheral/{VSOCK_ID}/virtio-backend" if bus.is_pci else f"/machine/peripheral/{VSOCK_ID}"


def share(device: ShareDevice, bus: Bus) -> Args:
    chardev = option("socket", {"id": device.id, "path": device.socket_path})
    fields = share_fields(device, device.id)
    return ("-chardev", chardev, "-device", option(bus.virtio("vhost-user-fs"), fields))


def share_fields(device: ShareDevice, chardev: str) -> Fields:
    """Fields of a virtio-fs device, in the argv or plugged later."""
    return {"chardev": chardev, "tag": device.tag, "queue-size": device.queue_size}


def connected_chardev(chardev: str, *, fd_name: str) -> dict[str, object]:
    """Arguments of chardev-add for the connection that QEMU got as `fd_name`."""
    address = {"type": "fd", "data": {"str": fd_name}}
    return {"id": chardev, "backend": {"type": "socket", "data": {"addr": address, "server": False}}}


def generation_id() -> Args:
    """The VM generation ID, a number in the guest's memory that each QEMU chooses anew. When it changes, the guest
    reseeds its random number generator before it goes on. Source: QEMU's docs/specs/vmgenid.
    """
    return ("-device", "vmgenid,guid=auto")


def entropy(source: str, bus: Bus) -> Args:
    backend = option("rng-random", {"id": "rng0", "filename": source})
    return ("-object", backend, "-device", bus.virtio("virtio-rng") + ",rng=rng0")


def balloon(bus: Bus) -> Args:
    """Returns the pages that the guest reports as free to the host. The shim never inflates the balloon."""
    fields: Fields = {"id": "balloon0", "deflate-on-oom": True, "free-page-reporting": True}
    return ("-device", option(bus.virtio("virtio-balloon", is_transitional=True), fields))


def root_image(path: str, driver: ImageDriver, bus: Bus, *, image_bytes: int) -> Args:
    """The guest's read-only root image, the same file for every VM of the node."""
    if driver is ImageDriver.PMEM:
        backend: Fields = {"id": "pmem0", "mem-path": path, "size": image_bytes, "readonly": True, "share": True}
        device = option("nvdimm", {"id": "nv0", "memdev": "pmem0", "unarmed": True})
        return ("-object", option("memory-backend-file", backend), "-device", device)
    return _read_only_disk(IMAGE_NODE, path, bus, {"id": "virtio-image0", "share-rw": True})


def initdata(path: str, bus: Bus) -> Args:
    """The measured document as a disk, which the guest finds by its serial number."""
    return _read_only_disk(INITDATA_NODE, path, bus, {"id": "virtio-initdata0", "serial": INITDATA_NODE})


def extension(disk: ExtensionDisk, bus: Bus) -> Args:
    """A virtio-blk disk: on no other bus do the guest's udev rules see the serial number."""
    name = f"extension-{disk.name}"
    return _read_only_disk(name, disk.path, bus, {"id": name, "serial": name, "share-rw": True})


def _read_only_disk(node_name: str, path: str, bus: Bus, fields: Fields) -> Args:
    node: Fields = {
        "node-name": node_name,
        "read-only": True,
        "file.driver": "file",
        "file.filename": path,
        "file.aio": "threads",
    }
    device = option(bus.virtio("virtio-blk", is_transitional=True), {"drive": node_name, **fields})
    return ("-blockdev", option("driver=raw", node), "-device", device)


def nic(device: NicDevice, bus: Bus, *, tap_fds: tuple[int, ...], vhost_fds: tuple[int, ...]) -> Args:
    """A NIC on taps. Descriptors are separated by colons: QEMU has no list of them with commas."""
    netdev: Fields = {"id": netdev_id(device.id), "fds": _colons(tap_fds)}
    if vhost_fds:
        netdev |= {"vhost": True, "vhostfds": _colons(vhost_fds)}
    fields = nic_fields(device, bus, len(tap_fds))
    return ("-netdev", option("tap", netdev), "-device", option(bus.virtio("virtio-net", is_transitional=True), fields))


def vhost_user_nic(device: VhostUserNic, bus: Bus, accelerator: Accelerator) -> Args:
    """As QEMU starts, it connects to the socket and waits until the program has answered."""
    chardev = chardev_id(device.id)
    netdev: Fields = {"id": netdev_id(device.id), "chardev": chardev, "queues": device.queues}
    fields = nic_fields(device, bus, device.queues) | _vectors(bus, accelerator)
    if device.queue_size:
        fields |= {"rx_queue_size": device.queue_size, "tx_queue_size": device.queue_size}
    return (
        "-chardev",
        option("socket", {"id": chardev, "path": device.socket_path}),
        "-netdev",
        option("vhost-user", netdev),
        "-device",
        option(bus.virtio("virtio-net", is_transitional=True), fields),
    )


def _vectors(bus: Bus, accelerator: Accelerator) -> Fields:
    """No MSI-X for a vhost-user device without KVM: QEMU 7.2 crashes when the guest's driver unmasks a vector."""
    return {"vectors": 0} if bus.is_pci and accelerator is not Accelerator.KVM else {}


def nic_fields(device: NicDevice | VhostUserNic, bus: Bus, queues: int) -> Fields:
    """Fields of a virtio-net device, in the argv or plugged later. With an empty `romfile` no boot ROM is needed."""
    fields: Fields = {"netdev": netdev_id(device.id), "id": qdev_id(device.id), "mac": device.mac}
    if queues > 1:
        fields |= {"mq": True}
        if bus.is_pci:
            fields |= {"vectors": nic_vectors(queues)}
    if bus.is_pci:
        fields |= {"romfile": ""}
    return {**fields, "host_mtu": device.mtu} if device.mtu else fields


def nic_vectors(queues: int) -> int:
    """The number of interrupt vectors: one per direction and queue, one for control, one for configuration."""
    return 2 * queues + 2


def _colons(fds: tuple[int, ...]) -> str:
    return ":".join(map(str, fds))
