"""A VM: its configuration, what its driver can do, and how it ended. Every hypervisor driver uses these types."""

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from pyshim.model.architecture import MACHINE_TYPES, MachineType
from pyshim.model.confidential import Guard
from pyshim.model.confinement import NO_LABELS, ProcessLabels
from pyshim.model.errors import InvalidArgument
from pyshim.model.host_facts import Accelerator
from pyshim.model.remote_vms import RemoteServiceConfig


class MemoryBacking(StrEnum):
    """The host memory behind guest RAM. virtio-fs and vhost-user need SHARED_MEMFD or HUGEPAGES, which are shared."""

    PRIVATE = "private"
    SHARED_MEMFD = "shared-memfd"
    HUGEPAGES = "hugepages"


class ImageDriver(StrEnum):
    VIRTIO_BLK = "virtio-blk"
    PMEM = "pmem"


class BootConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The guest's boot files. At least one of `image` and `initrd` is set; with both, the initrd mounts the image."""

    kernel: str
    kernel_params: tuple[str, ...]
    initrd: str | None
    image: str | None
    image_driver: ImageDriver
    firmware: str | None


class VcpuCount(msgspec.Struct, frozen=True, kw_only=True):
    boot_vcpus: int
    max_vcpus: int


class CpuConfig(VcpuCount, frozen=True, kw_only=True):
    accelerator: Accelerator
    model: str
    """QEMU's -cpu text, features included."""


class MemorySize(msgspec.Struct, frozen=True, kw_only=True):
    boot_mib: int
    max_mib: int
    """The VM can grow to this size; 0 or `boot_mib`: it cannot grow."""
    slots: int = 0
    virtio_mem: bool = False
    """The VM is resized by one virtio-mem device of `max_mib - boot_mib`, which can also shrink, instead of by DIMMs in
    `slots`."""


class MemoryConfig(MemorySize, frozen=True, kw_only=True):
    backing: MemoryBacking
    prealloc: bool
    reclaim: bool = False
    """A balloon device returns the pages that the guest reports as free to the host."""
    host_nodes: tuple[int, ...] = ()
    """The host's NUMA nodes that guest RAM is allocated from while they have room; empty: any node."""


class GuestNode(msgspec.Struct, frozen=True, kw_only=True):
    """A NUMA node of the guest and the host resources behind it. Its number is its index in `LocalVm.numa`."""

    vcpus: tuple[int, ...]
    memory_mib: int
    distances: tuple[int, ...]
    """The distance to every node of the guest, in the order of `LocalVm.numa`; 10 to itself."""
    memory_nodes: tuple[int, ...]
    """The host's NUMA nodes that its memory is allocated from while they have room."""
    cpus: tuple[int, ...]
    """The host's CPUs that its vCPUs run on."""


class ShareDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A virtio-fs device. virtiofsd already listens at `socket_path`."""

    id: str = "share0"
    tag: str
    socket_path: str
    queue_size: int


class VsockChannel(msgspec.Struct, frozen=True, kw_only=True):
    """The agent is reached by vhost-vsock. The driver picks a free CID and reports it in `agent_address`."""

    port: int


class SerialChannel(msgspec.Struct, frozen=True, kw_only=True):
    """The agent is reached by the virtio-serial port `port_name`, whose host end is the unix socket `socket_path`."""

    port_name: str
    socket_path: str


class VhostUserVsockChannel(msgspec.Struct, frozen=True, kw_only=True):
    """The agent is reached by a vsock device that vhost-device-vsock serves; it needs shared guest RAM.

    The driver starts and ends one vhost-device-vsock for each VM.
    """

    port: int
    program: str
    device_path: str
    """Unix socket of the device, to which the VMM connects."""
    socket_path: str
    """Unix socket to which the shim connects; it then names a port of the guest (`HvsockAddress`)."""


AgentChannel = VsockChannel | SerialChannel | VhostUserVsockChannel


class NicDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A virtio-net device on tap queues. The caller owns the fds; the VMM has copies after `create` or `plug`."""

    id: str
    mac: str
    tap_fds: tuple[int, ...]
    vhost_fds: tuple[int, ...]
    mtu: int


class VhostUserNic(msgspec.Struct, frozen=True, kw_only=True):
    """A virtio-net device that a program serves at `socket_path`; it needs shared guest RAM."""

    id: str
    mac: str
    socket_path: str
    queues: int
    queue_size: int
    """0: the VMM's default."""
    mtu: int


class DiskBus(StrEnum):
    """The disk in the guest is a PCI or MMIO device of its own, or one of many behind the SCSI controller."""

    VIRTIO_BLK = "virtio-blk"
    VIRTIO_SCSI = "virtio-scsi"


class DiskAio(StrEnum):
    """The VMM's interface for asynchronous I/O. NATIVE needs `DiskCache.direct`."""

    IO_URING = "io_uring"
    NATIVE = "native"
    THREADS = "threads"


class DiskCache(msgspec.Struct, frozen=True, kw_only=True):
    direct: bool
    """The host's page cache is bypassed (O_DIRECT)."""
    no_flush: bool
    """The guest's flushes are ignored: faster, but a crash of the host loses data."""


class DiskTuning(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of all disks of one sandbox. A size or count of 0 is the VMM's default."""

    bus: DiskBus
    aio: DiskAio
    """IO_URING falls back to THREADS where the host's kernel has no io_uring."""
    cache: DiskCache
    logical_block_bytes: int
    physical_block_bytes: int
    queues: int
    """Of each virtio-blk disk."""
    queue_size: int


class ScsiController(msgspec.Struct, frozen=True, kw_only=True):
    """The virtio-scsi controller that a VM boots with, for all its SCSI disks."""

    queues: int
    queue_size: int
    """0 in either: the VMM's default."""
    iothread: str
    """Name of the I/O thread that serves its disks; empty: the VMM's main loop."""


class VhostUserBackend(msgspec.Struct, frozen=True, kw_only=True):
    """A program on the host that serves a disk; it needs shared guest RAM."""

    reconnect_s: int
    """Seconds between the VMM's attempts to connect again after the program has gone; 0: no attempts."""


class BlockDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A disk backed by a block device or file of the host."""

    id: str
    path: str
    """The device or file; with `vhost_user`, the socket where the program listens."""
    read_only: bool
    discard: bool
    """Blocks that the guest discards are freed in the host's file or device."""
    serial: str
    """The serial number that the guest reads; empty for none. Cut to 20 characters, virtio's limit."""
    iothread: str
    """Name of the I/O thread that serves it, made with the first disk that names it; empty: the VMM's main loop.
    Ignored for a SCSI disk, which the thread of its controller serves."""
    tuning: DiskTuning
    vhost_user: VhostUserBackend | None = None
    """Serves the disk instead of the VMM. The program decides cache, AIO, serial number and write protection."""


class PortKind(StrEnum):
    """The kind of port a PCI device is plugged into, as in Kata's `hot_plug_vfio` and `cold_plug_vfio`."""

    ROOT = "root-port"
    SWITCH = "switch-port"
    BRIDGE = "bridge-port"


class VfioDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A PCI function of the host that is passed through to the VM; a VFIO driver is bound to it."""

    id: str
    host_address: str
    """Domain, bus, slot, function: `0000:65:00.0`."""
    iommufd: bool
    """The VMM opens /dev/iommu and the function's own node, instead of the node of its IOMMU group."""
    vendor_id: str = ""
    device_id: str = ""
    """The ids that the guest sees, as in sysfs (`0x10de`); empty: the function's own."""


class EmulatedDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A PCI device that the VMM emulates. Tests use it in place of a VfioDevice, which their hosts do not have."""

    id: str
    model: str
    """The VMM's name for the model, such as QEMU's `edu`."""
    properties: Mapping[str, str | int | bool] = msgspec.field(default_factory=dict)


PciDevice = VfioDevice | EmulatedDevice


FIRST_BRIDGE_SLOT = 2
"""The slot on the root bus of the first PCI bridge for hotplug; the other bridges follow."""


class PciPort(msgspec.Struct, frozen=True, kw_only=True):
    """A PCIe port for one device, which is at slot 0 behind the port. `bus`, `slot` and `pci_path` are the port's."""

    id: str
    """The VMM's name for the port and for the bus behind it."""
    kind: PortKind
    bus: str
    slot: int
    pci_path: str


class PlacedDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A device that the VM boots with, and its place."""

    device: PciDevice
    bus: str
    slot: int
    pci_path: str
    """The device's path in the guest: slots from the root bus down."""


class PciLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The PCIe ports of a VM and the devices it boots with, from `resources/devices/plan/pci_topology.py`."""

    ports: tuple[PciPort, ...] = ()
    placed: tuple[PlacedDevice, ...] = ()
    hot_plug: PortKind | None = None
    """The kind of port for devices plugged into the running VM; None: no device can be plugged."""
    iommu: bool = False
    """The guest has an IOMMU, which a container needs to drive a device itself (`vfio_mode = "vfio"`)."""


Device = BlockDevice | NicDevice | VfioDevice | EmulatedDevice | ShareDevice


class GuestLocation(msgspec.Struct, frozen=True, kw_only=True):
    """The place of a plugged device in the guest."""

    pci_path: str
    """Slots from the root bus down, such as `02/01`; for a SCSI disk, the path of the controller."""
    scsi_address: str = ""
    """`ID:LUN` of a SCSI disk; empty for other devices."""


class ExtensionDisk(msgspec.Struct, frozen=True, kw_only=True):
    """A read-only disk that extends the guest's image; the guest finds it by the serial number `extension-NAME`."""

    name: str
    path: str


class MemoryDump(msgspec.Struct, frozen=True, kw_only=True):
    """The dump of guest RAM that is written when the guest's kernel panics."""

    directory: str
    """The dump goes into a subdirectory named after the sandbox, which is made for it."""
    paging: bool
    """The dump has the guest's virtual addresses as well as the physical ones."""


class RemoteVm(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of a VM that a service makes on another host."""

    sandbox_id: str
    uuid: str
    vm_dir: str
    """The sandbox's directory on this host."""
    machine_type: str
    """The service's name for a kind of instance; empty: the service chooses by the size."""
    cpu: VcpuCount
    memory: MemorySize
    netns_path: str | None
    """The namespace on this host that the service connects to the VM; None: the service makes one."""
    service: RemoteServiceConfig
    start_timeout_s: float
    stop_timeout_s: float


class LocalVm(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of a VM on this host."""

    sandbox_id: str
    uuid: str
    """It is in the VMM's argv, by which clean-up finds the process without its pid."""
    vm_dir: str
    hypervisor_path: str
    machine_type: str
    machine_options: tuple[str, ...]
    boot: BootConfig
    cpu: CpuConfig
    memory: MemoryConfig
    share: ShareDevice | None
    agent_channel: AgentChannel
    nics: tuple[NicDevice, ...]
    bridges: int
    """Number of PCI bridges for hotplug."""
    scsi: ScsiController | None
    """None: no SCSI disks can be plugged."""
    entropy_source: str
    """The file that the guest's random number device reads; empty for no such device."""
    guard: Guard | None
    """The protection of a confidential guest; None for a plain VM."""
    initdata: str
    """The file with the initdata document, which the guest reads as a small disk; empty for none."""
    seccomp_sandbox: str
    """The text of QEMU's -sandbox; empty for none."""
    netns_path: str | None
    """The network namespace of the VMM. None: the host's with `in_host_netns`, else an empty one."""
    extra_monitor: str
    """A second monitor, for operators: `hmp`, `qmp` or `qmp-pretty`; empty for none."""
    nested: bool
    """The host is itself a VM; with KVM, virtio devices then use the legacy protocol."""
    debug: bool
    start_timeout_s: float
    pci: PciLayout = PciLayout()
    numa: tuple[GuestNode, ...] = ()
    """Together they have all vCPUs and all memory; empty: the guest has one node."""
    extensions: tuple[ExtensionDisk, ...] = ()
    vhost_user_nics: tuple[VhostUserNic, ...] = ()
    in_host_netns: bool = False
    """The VMM stays in the host's network namespace (`disable_new_netns`); `netns_path` is None then."""
    stop_timeout_s: float = 10.0
    """Seconds that `stop` may take."""
    is_privileged: bool = False
    """The VMM and vhost-device-vsock keep the shim's capabilities."""
    memory_dump: MemoryDump | None = None
    dumps_core: bool = False
    """A crash of the VMM or of vhost-device-vsock may write a core file, which contains guest memory."""
    labels: ProcessLabels = NO_LABELS
    """Labels of the VMM and of vhost-device-vsock."""
    first_user_id: int = 0
    """The first of the user ids from which each sandbox's VMM gets its own; 0: the VMM runs as root."""
    opens_sockets: bool = False
    """The running VMM connects to the sockets of programs that serve disks, which root may own."""
    is_copyable: bool = False
    """The machine can be saved as a template: its memory is a file, and the guest can detect that it is a copy."""
    saved_machine: str = ""
    """The directory of the template from which the VM continues, paused at first; empty: it boots. A template has no
    share, which is plugged afterwards."""

    @property
    def machine(self) -> MachineType:
        return MACHINE_TYPES[self.machine_type]

    @property
    def has_empty_netns(self) -> bool:
        """The VMM runs in a network namespace of its own that has no links."""
        return self.netns_path is None and not self.in_host_netns


VmConfig = LocalVm | RemoteVm


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a driver can do with one configuration. Callers check it before they act."""

    block_hotplug: bool
    network_hotplug: bool
    cpu_hotplug: bool
    memory_hotplug: bool
    pause: bool
    pci_hotplug: bool = False
    """VFIO and emulated PCI devices can be plugged into the running VM."""
    reports_end: bool = True
    """`wait` also returns when the VM ends by itself, not only after `stop`."""


class VmExitKind(StrEnum):
    REQUESTED = "requested"
    GUEST_SHUTDOWN = "guest-shutdown"
    GUEST_PANIC = "guest-panic"
    VMM_DIED = "vmm-died"


class VmExit(msgspec.Struct, frozen=True, kw_only=True):
    kind: VmExitKind
    reason: str
    """For the user: the cause, with the VMM's last output and the last lines of the console."""


def split_params(text: str) -> tuple[str, ...]:
    """The parameters of a kernel command line. Blanks within double quotes do not separate, as in the kernel's parser.

    Raises InvalidArgument when a double quote is not closed.
    """
    words: list[str] = []
    word = ""
    quoted = False
    for char in text:
        if char == '"':
            quoted = not quoted
            word += char
        elif char.isspace() and not quoted:
            if word:
                words.append(word)
            word = ""
        else:
            word += char
    if quoted:
        raise InvalidArgument(f"read kernel_params {text[:200]!r}: a double quote is not closed")
    return (*words, word) if word else tuple(words)
