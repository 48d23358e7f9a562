"""A VM's parts, its driver's capabilities, its end: the nouns of every hypervisor driver."""

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from pyshim.model.confidential import Guard
from pyshim.model.errors import InvalidArgument
from pyshim.model.host_facts import Accelerator
from pyshim.model.labels import NO_LABELS, ProcessLabels
from pyshim.model.remote_vms import RemoteServiceConfig


class MemoryBacking(StrEnum):
    """Backing of guest RAM. Only the shared kinds work with virtio-fs."""

    PRIVATE = "private"
    SHARED_MEMFD = "shared-memfd"
    HUGEPAGES = "hugepages"


class ImageDriver(StrEnum):
    VIRTIO_BLK = "virtio-blk"
    PMEM = "pmem"


class BootConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The guest's boot files: kernel and parameters, and a root image, an initrd, or both (initrd as its loader)."""

    kernel: str
    kernel_params: tuple[str, ...]
    initrd: str | None
    image: str | None
    image_driver: ImageDriver
    firmware: str | None


class CpuConfig(msgspec.Struct, frozen=True, kw_only=True):
    accelerator: Accelerator
    model: str
    """QEMU's -cpu text, features included."""
    boot_vcpus: int
    max_vcpus: int


class MemoryConfig(msgspec.Struct, frozen=True, kw_only=True):
    boot_mib: int
    max_mib: int
    """0 or equal to `boot_mib`: no hotplug offered."""
    slots: int
    backing: MemoryBacking
    prealloc: bool
    virtio_mem: bool
    """Grow, and shrink again, by one virtio-mem device of `max_mib - boot_mib` instead of DIMMs in `slots`."""
    reclaim: bool = False
    """A balloon device takes the pages the guest reports as free, and the host has them back."""
    host_nodes: tuple[int, ...] = ()
    """The host's NUMA nodes that all of it comes from, if there is room; empty: from anywhere."""


class GuestNode(msgspec.Struct, frozen=True, kw_only=True):
    """A NUMA node of the guest, and what of the host is behind it. Numbered by its place in `VmConfig.numa`."""

    vcpus: tuple[int, ...]
    memory_mib: int
    distances: tuple[int, ...]
    """To every node of the guest, in their order; 10 to itself."""
    memory_nodes: tuple[int, ...]
    """The host's nodes its memory comes from, if there is room."""
    cpus: tuple[int, ...]
    """The host's CPUs its vCPUs run on."""


class ShareDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A virtio-fs device: `socket_path` is where virtiofsd already listens."""

    id: str = "share0"
    tag: str
    socket_path: str
    queue_size: int


class VsockChannel(msgspec.Struct, frozen=True, kw_only=True):
    """The agent over vhost-vsock; the driver picks a free CID and reports it in `agent_address`."""

    port: int


class SerialChannel(msgspec.Struct, frozen=True, kw_only=True):
    """The agent over one virtio-serial port named `port_name`; the host end is the unix socket `socket_path`."""

    port_name: str
    socket_path: str


class VhostUserVsockChannel(msgspec.Struct, frozen=True, kw_only=True):
    """The agent over a vsock device that a program of the host serves, in memory the guest shares.

    The driver starts the program, vhost-device-vsock, for this VM, and ends it.
    """

    port: int
    program: str
    device_path: str
    """Unix socket of the device, for the VMM."""
    socket_path: str
    """Unix socket where a connection asks for one of the guest's ports: `HvsockAddress`."""


AgentChannel = VsockChannel | SerialChannel | VhostUserVsockChannel


class NicDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A virtio-net device on tap queues. The fds stay the caller's: the VMM has copies after `create` or `plug`."""

    id: str
    mac: str
    tap_fds: tuple[int, ...]
    vhost_fds: tuple[int, ...]
    mtu: int


class VhostUserNic(msgspec.Struct, frozen=True, kw_only=True):
    """A virtio-net device served by a program at `socket_path`, in memory the guest shares. 0: default size."""

    id: str
    mac: str
    socket_path: str
    queues: int
    queue_size: int
    mtu: int


class DiskBus(StrEnum):
    """The kind of disk in the guest: a device of its own, or one of the disks behind a SCSI controller."""

    VIRTIO_BLK = "virtio-blk"
    VIRTIO_SCSI = "virtio-scsi"


class DiskAio(StrEnum):
    """The VMM's way to read and write; NATIVE works only with `DiskCache.direct`."""

    IO_URING = "io_uring"
    NATIVE = "native"
    THREADS = "threads"


class DiskCache(msgspec.Struct, frozen=True, kw_only=True):
    direct: bool
    """Bypass the host page cache (O_DIRECT)."""
    no_flush: bool
    """The guest's flushes are ignored: fast, and gone with the host."""


class DiskTuning(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of all disks of one sandbox."""

    bus: DiskBus
    aio: DiskAio
    """IO_URING falls back to threads where the host's kernel offers none."""
    cache: DiskCache
    logical_block_bytes: int
    physical_block_bytes: int
    queues: int
    queue_size: int
    """0 for any of the last four: the VMM's default. Queues: of each virtio-blk disk."""


class ScsiController(msgspec.Struct, frozen=True, kw_only=True):
    """A virtio-scsi controller, there from the start, for all SCSI disks of the VM. 0: the VMM's default."""

    queues: int
    queue_size: int
    iothread: str
    """Name of the I/O thread that serves its disks; empty: the VMM's main loop."""


class VhostUserBackend(msgspec.Struct, frozen=True, kw_only=True):
    """A program on the host that serves a disk out of the guest's memory, which has to be of a shared kind."""

    reconnect_s: int
    """Seconds between attempts to reach it again when it has gone; 0: none are made."""


class BlockDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A disk backed by a host block device or file. Holds nothing of the host but what the VMM has open."""

    id: str
    path: str
    """The device or file; with `vhost_user` the socket where its program listens."""
    read_only: bool
    discard: bool
    """Blocks that the guest trims are given back to the host's file or device."""
    serial: str
    """The serial number that the guest reads; empty for none. Cut to 20 characters, virtio's limit."""
    iothread: str
    """Name of the I/O thread that serves it, made when first named; empty: the VMM's main loop. A SCSI disk is served
    by its controller's."""
    tuning: DiskTuning
    vhost_user: VhostUserBackend | None = None
    """The program that serves it instead of the VMM, and decides cache, AIO, serial number and write protection."""


class PortKind(StrEnum):
    """The port of a PCI device; the values are those of Kata's `hot_plug_vfio` and `cold_plug_vfio`."""

    ROOT = "root-port"
    SWITCH = "switch-port"
    BRIDGE = "bridge-port"


class VfioDevice(msgspec.Struct, frozen=True, kw_only=True):
    """One function of the host, bound to a VFIO driver, for the VM alone."""

    id: str
    host_address: str
    """Domain, bus, slot, function: `0000:65:00.0`."""
    iommufd: bool
    """Through /dev/iommu and the function's own node instead of its IOMMU group's."""
    vendor_id: str = ""
    device_id: str = ""
    """Ids that the guest must see, in sysfs form (`0x10de`). Empty for the device's own."""


class EmulatedDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A device model of the VMM's own where a passed-through one would be, on hosts that have none to give."""

    id: str
    model: str
    """The VMM's name for it, such as QEMU's `edu`."""
    properties: Mapping[str, str | int | bool] = msgspec.field(default_factory=dict)


PciDevice = VfioDevice | EmulatedDevice


FIRST_BRIDGE_SLOT = 2
"""Of the bridges for hotplug, on the root bus."""


class PciPort(msgspec.Struct, frozen=True, kw_only=True):
    """A PCIe port that takes one device, at slot 0 behind it."""

    id: str
    """The VMM's name for it, and for the bus behind it."""
    kind: PortKind
    bus: str
    slot: int
    """The port's own bus."""
    pci_path: str
    """The port's own guest PCI path."""


class PlacedDevice(msgspec.Struct, frozen=True, kw_only=True):
    device: PciDevice
    bus: str
    slot: int
    pci_path: str
    """The device's path in the guest: slots from the root bus down."""


class PciLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The ports of a VM and the devices it boots with; `resources/devices/plan/pci_topology.py` decides it."""

    ports: tuple[PciPort, ...] = ()
    placed: tuple[PlacedDevice, ...] = ()
    hot_plug: PortKind | None = None
    """The bus for devices plugged while it runs; None without hotplug."""
    iommu: bool = False
    """The guest can put devices into domains of their own: what a container needs to drive one itself."""


Device = BlockDevice | NicDevice | VfioDevice | EmulatedDevice | ShareDevice


class GuestLocation(msgspec.Struct, frozen=True, kw_only=True):
    """A plugged device's path in the guest."""

    pci_path: str
    """Slots from the root bus down, e.g. `02/01`; of a SCSI disk, its controller's."""
    scsi_address: str = ""
    """`ID:LUN` of a SCSI disk, else empty."""


class ExtensionDisk(msgspec.Struct, frozen=True, kw_only=True):
    """A read-only disk that extends the guest's image; the guest finds it by the serial number `extension-NAME`."""

    name: str
    path: str


class MemoryDump(msgspec.Struct, frozen=True, kw_only=True):
    directory: str
    """Each sandbox has a directory in it, made when needed."""
    paging: bool
    """The file has the guest's virtual addresses beside the physical ones."""


class VmConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One VM, decided: every field has its final value."""

    sandbox_id: str
    uuid: str
    """Also how a sweeper recognises the VMM process without a pid."""
    vm_dir: str
    hypervisor_path: str
    machine_type: str
    machine_options: tuple[str, ...]
    boot: BootConfig
    cpu: CpuConfig
    memory: MemoryConfig
    share: ShareDevice | None
    agent_channel: AgentChannel | None
    """None: the service that makes the VM says where its agent answers."""
    nics: tuple[NicDevice, ...]
    bridges: int
    """PCI bridges for hotplug."""
    scsi: ScsiController | None
    """None: the VM takes no SCSI disks."""
    entropy_source: str
    """The file the guest's random number device reads; empty for no such device."""
    guard: Guard | None
    """The guard that keeps the host out of the guest; None for a plain VM."""
    initdata: str
    """A file that the guest reads as a small disk: the document that its owner had measured. Empty for none."""
    seccomp_sandbox: str
    """QEMU's -sandbox text; empty for none."""
    netns_path: str | None
    """Network namespace the VMM runs in. None: an empty one of its own, or the host's with `in_host_netns`."""
    extra_monitor: str
    """A second monitor for people: `hmp`, `qmp` or `qmp-pretty`; empty for none."""
    nested: bool
    debug: bool
    start_timeout_s: float
    pci: PciLayout = PciLayout()
    numa: tuple[GuestNode, ...] = ()
    """Together they have all vCPUs and all memory. Empty: the guest has one node."""
    extensions: tuple[ExtensionDisk, ...] = ()
    vhost_user_nics: tuple[VhostUserNic, ...] = ()
    in_host_netns: bool = False
    """Without `netns_path`: the VMM stays in the host's network namespace (`disable_new_netns`)."""
    stop_timeout_s: float = 10.0
    """Seconds that `stop` may take."""
    is_privileged: bool = False
    """The VMM, and a vsock program, keep the shim's capabilities."""
    memory_dump: MemoryDump | None = None
    """Where the guest's memory is written when its kernel panics; None for no dump."""
    dumps_core: bool = False
    """A crash of the VMM, or of a vsock program, may write a core, guest memory included."""
    labels: ProcessLabels = NO_LABELS
    """Of the VMM and a vsock program."""
    first_user_id: int = 0
    """The VMM's user, another one for each sandbox; 0 for root."""
    opens_sockets: bool = False
    """While it runs, the VMM itself connects to programs that serve disks, whose sockets may be root's."""
    is_copyable: bool = False
    """The machine can be saved, and others continue from it: its memory is a file, and the guest sees that it is a
    copy."""
    saved_machine: str = ""
    """The directory of the saved machine that the VM continues from, paused there; empty: it boots. The share is not in
    that machine: it is plugged."""
    remote: RemoteServiceConfig | None = None
    """Set for a remote VM; then the fields that describe a VMM of this host are empty."""

    @property
    def has_empty_netns(self) -> bool:
        """The VMM runs in a network namespace of its own that has no links."""
        return self.netns_path is None and not self.in_host_netns


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """A driver's capabilities for this configuration, asked before acting."""

    block_hotplug: bool
    network_hotplug: bool
    cpu_hotplug: bool
    memory_hotplug: bool
    pause: bool
    pci_hotplug: bool = False
    """Takes VFIO and emulated PCI devices while it runs."""
    reports_end: bool = True
    """`wait` answers when the VM ends by itself, not only when it was stopped."""


class VmExitKind(StrEnum):
    REQUESTED = "requested"
    GUEST_SHUTDOWN = "guest-shutdown"
    GUEST_PANIC = "guest-panic"
    VMM_DIED = "vmm-died"


class VmExit(msgspec.Struct, frozen=True, kw_only=True):
    kind: VmExitKind
    reason: str
    """One sentence for the user, the VMM's own words and the last console lines included."""


def split_params(text: str) -> tuple[str, ...]:
    """The parameters of a kernel command line; double quotes protect spaces, as in the kernel's own parser."""
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
