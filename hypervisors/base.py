"""The seam every hypervisor plugs into: what a VM is made of, what a driver can do, and the dozen calls it answers.

A driver object is one VM's whole life: `create` -> `start` -> (`pause`/`resume`, `plug`/`unplug`, `resize_*`) ->
`stop`. Every host resource a driver makes goes through the `Ledger` it was given, before it is made.
"""

from collections.abc import Mapping
from dataclasses import field
from enum import StrEnum
from typing import Protocol

from pyshim.model.agent_address import AgentAddress
from pyshim.model.confidential import Guard
from pyshim.model.dataclasses import dataclass
from pyshim.model.host_facts import Accelerator
from pyshim.model.remote_vms import RemoteServiceConfig


class MemoryBacking(StrEnum):
    """Where guest RAM lives. Only the shared kinds work with virtio-fs."""

    PRIVATE = "private"
    SHARED_MEMFD = "shared-memfd"
    SHARED_FILE = "shared-file"
    HUGEPAGES = "hugepages"


class ImageDriver(StrEnum):
    VIRTIO_BLK = "virtio-blk"
    PMEM = "pmem"


@dataclass(frozen=True, slots=True, kw_only=True)
class BootConfig:
    """What the guest boots: kernel and parameters, and a root image, an initrd, or both (initrd as its loader)."""

    kernel: str
    kernel_params: tuple[str, ...]
    initrd: str | None
    image: str | None
    image_driver: ImageDriver
    firmware: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuConfig:
    accelerator: Accelerator
    model: str
    """QEMU's -cpu text, features included."""
    boot_vcpus: int
    max_vcpus: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConfig:
    boot_mib: int
    max_mib: int
    """0 or equal to `boot_mib`: no hotplug offered."""
    slots: int
    backing: MemoryBacking
    prealloc: bool
    virtio_mem: bool
    """Grow, and shrink again, by one virtio-mem device of `max_mib - boot_mib` instead of DIMMs in `slots`."""
    host_nodes: tuple[int, ...] = ()
    """The host's NUMA nodes that all of it comes from, if there is room; empty: from anywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareDevice:
    """A virtio-fs device: `socket_path` is where virtiofsd already listens."""

    tag: str
    socket_path: str
    queue_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VsockChannel:
    """The agent over vhost-vsock; the driver picks a free CID and reports it in `agent_address`."""

    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SerialChannel:
    """The agent over one virtio-serial port named `port_name`; the host end is the unix socket `socket_path`."""

    port_name: str
    socket_path: str


AgentChannel = VsockChannel | SerialChannel


@dataclass(frozen=True, slots=True, kw_only=True)
class NicDevice:
    """A virtio-net device on tap queues. The fds stay the caller's: the VMM has copies after `create` or `plug`."""

    id: str
    mac: str
    tap_fds: tuple[int, ...]
    vhost_fds: tuple[int, ...]
    mtu: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VhostUserNic:
    """A virtio-net device served by who listens at `socket_path`, in memory the guest shares. 0: default size."""

    id: str
    mac: str
    socket_path: str
    queues: int
    queue_size: int
    mtu: int


class DiskBus(StrEnum):
    """What a disk is to the guest: a device of its own, or one of the disks behind a SCSI controller."""

    VIRTIO_BLK = "virtio-blk"
    VIRTIO_SCSI = "virtio-scsi"


class DiskAio(StrEnum):
    """How the VMM reads and writes; NATIVE works only with `DiskCache.direct`."""

    IO_URING = "io_uring"
    NATIVE = "native"
    THREADS = "threads"


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskCache:
    direct: bool
    """Bypass the host page cache (O_DIRECT)."""
    no_flush: bool
    """The guest's flushes are ignored: fast, and gone with the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskTuning:
    """How disks work, the same for all disks of one sandbox."""

    bus: DiskBus
    aio: DiskAio
    """IO_URING falls back to threads where the host's kernel offers none."""
    cache: DiskCache
    logical_block_bytes: int
    physical_block_bytes: int
    queues: int
    queue_size: int
    """0 for any of the last four: the VMM's default. Queues: of each virtio-blk disk, or the SCSI controller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VhostUserBackend:
    """A program on the host that serves a disk out of the guest's memory, which has to be of a shared kind."""

    reconnect_s: int
    """Seconds between attempts to reach it again when it has gone; 0: none are made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockDevice:
    """A disk backed by a host block device or file. Holds nothing of the host but what the VMM has open."""

    id: str
    path: str
    """The device or file; with `vhost_user` the socket where its program listens."""
    read_only: bool
    discard: bool
    """What the guest trims is given back to the host's file or device."""
    serial: str
    """What the guest reads as serial number; empty for none. Cut to 20 characters, virtio's limit."""
    iothread: str
    """Name of the I/O thread that serves it, made when first named; empty: the VMM's main loop. A SCSI controller has
    the thread of its first disk."""
    tuning: DiskTuning
    vhost_user: VhostUserBackend | None = None
    """Who serves it, if not the VMM. Cache, AIO, serial number and write protection are then the program's."""


class PortKind(StrEnum):
    """Where a PCI device is put; the values are those of Kata's `hot_plug_vfio` and `cold_plug_vfio`."""

    ROOT = "root-port"
    SWITCH = "switch-port"
    BRIDGE = "bridge-port"


@dataclass(frozen=True, slots=True, kw_only=True)
class VfioDevice:
    """One function of the host, bound to a VFIO driver, for the VM alone."""

    id: str
    host_address: str
    """Domain, bus, slot, function: `0000:65:00.0`."""
    iommufd: bool
    """Through /dev/iommu and the function's own node instead of its IOMMU group's."""
    vendor_id: str = ""
    device_id: str = ""
    """As sysfs has them (`0x10de`); the guest must see these. Empty: whatever the device says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedDevice:
    """A device model of the VMM's own where a passed-through one would be, on hosts that have none to give."""

    id: str
    model: str
    """The VMM's name for it, such as QEMU's `edu`."""
    properties: Mapping[str, str | int | bool] = field(default_factory=dict)


PciDevice = VfioDevice | EmulatedDevice


@dataclass(frozen=True, slots=True, kw_only=True)
class PciPort:
    """A PCIe port that takes one device, at slot 0 behind it."""

    id: str
    """The VMM's name for it, and for the bus behind it."""
    kind: PortKind
    bus: str
    slot: int
    """Where the port itself sits."""
    pci_path: str
    """The port's own guest PCI path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedDevice:
    device: PciDevice
    bus: str
    slot: int
    pci_path: str
    """Where the guest finds it: slots from the root bus down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PciLayout:
    """The ports of a VM and the devices it boots with; `plan/pci_topology.py` decides it."""

    ports: tuple[PciPort, ...] = ()
    placed: tuple[PlacedDevice, ...] = ()
    hot_plug: PortKind | None = None
    """Where further devices go while it runs; None: nowhere."""
    iommu: bool = False
    """The guest can put devices into domains of their own: what a container needs to drive one itself."""


Device = BlockDevice | NicDevice | VfioDevice | EmulatedDevice


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestLocation:
    """Where the guest finds a plugged device."""

    pci_path: str
    """Slots from the root bus down, e.g. `02/01`; of a SCSI disk, its controller's."""
    scsi_address: str = ""
    """`ID:LUN` of a SCSI disk, else empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VmConfig:
    """One VM, decided: nothing in here is a default that somebody still has to fill in."""

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
    """None: whoever makes the VM says where its agent answers."""
    nics: tuple[NicDevice, ...]
    bridges: int
    """PCI bridges for hotplug."""
    entropy_source: str
    """The file the guest's random number device reads; empty for no such device."""
    guard: Guard | None
    """What keeps the host out of the guest; None for a plain VM."""
    initdata: str
    """A file the guest reads as a small disk: the document its owner had measured. Empty for none."""
    seccomp_sandbox: str
    """QEMU's -sandbox text; empty for none."""
    netns_path: str | None
    """Network namespace the VMM runs in."""
    extra_monitor: bool
    nested: bool
    debug: bool
    start_timeout_s: float
    pci: PciLayout = PciLayout()
    vhost_user_nics: tuple[VhostUserNic, ...] = ()
    stop_timeout_s: float = 10.0
    """How long `stop` is waited for."""
    remote: RemoteServiceConfig | None = None
    """Set: the VM is made elsewhere, and what describes a VMM of this host is empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a driver can do for this configuration; asked before acting."""

    share_fs: bool
    block_hotplug: bool
    network_hotplug: bool
    cpu_hotplug: bool
    memory_hotplug: bool
    pause: bool
    pci_hotplug: bool = False
    """Takes VFIO and emulated PCI devices while it runs."""
    tells_end: bool = True
    """`wait` answers when the VM ends by itself, not only when it was stopped."""


class VmExitKind(StrEnum):
    REQUESTED = "requested"
    GUEST_SHUTDOWN = "guest-shutdown"
    GUEST_PANIC = "guest-panic"
    VMM_DIED = "vmm-died"


@dataclass(frozen=True, slots=True, kw_only=True)
class VmExit:
    kind: VmExitKind
    reason: str
    """One sentence for the user, the VMM's own words and the last console lines included."""


class Hypervisor(Protocol):
    """One VM. Errors are ShimErrors that name the sandbox and the VMM's own message."""

    def capabilities(self) -> Capabilities: ...

    async def create(self, config: VmConfig) -> None:
        """The VMM runs with the guest paused and answers its control channel; nothing is left behind on error."""

    async def start(self) -> None:
        """The guest's CPUs run."""

    async def stop(self) -> None:
        """The VMM is gone, politely asked first and killed after. Idempotent, and true also after a failed `create`."""

    async def wait(self) -> VmExit:
        """How the VM ended, once it has; every waiter gets the same answer."""

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def plug(self, device: Device) -> GuestLocation: ...

    async def unplug(self, device_id: str) -> None:
        """The guest has let go of the device and the VMM has dropped it."""

    async def resize_disk(self, device_id: str, size_bytes: int) -> None:
        """The guest sees the plugged disk with `size_bytes`; its host file or device has grown to that before."""

    async def resize_vcpus(self, vcpus: int) -> int:
        """The number of vCPUs the VM now has: as near to `vcpus` as this VM can come."""

    async def resize_memory(self, memory_mib: int) -> int:
        """The MiB of RAM the VM now has, at least `memory_mib`: it grows by whole guest memory blocks.

        Shrinks with `virtio_mem` only, never below the boot size, and no further than the guest gives back.
        """

    async def vcpu_thread_ids(self) -> tuple[int, ...]: ...

    @property
    def pid(self) -> int:
        """The VMM's pid in the host's pid namespace; 0 before `create`, and for a VM elsewhere."""

    @property
    def agent_address(self) -> AgentAddress:
        """Where the agent will answer; valid after `create`."""

    def console_tail(self) -> str:
        """The last lines of the guest console, for error texts."""

    def saved(self) -> Mapping[str, object]:
        """What goes into Kata's HypervisorState in persist.json."""
