"""The plans of a sandbox and of a container. `pod/plan` makes them, the modules of `pod` carry them out."""

from collections.abc import Mapping

import msgspec

from pyshim.model.confidential import Initdata
from pyshim.model.config import Config
from pyshim.model.confinement import CgroupPlan
from pyshim.model.devices import PodDevices
from pyshim.model.guest import GuestContainer, GuestSandbox, Storage
from pyshim.model.ids import ContainerId, HostPath, SandboxId
from pyshim.model.oci import ContainerKind
from pyshim.model.sizing import SavedPlacement, SizingRecord
from pyshim.model.vm import BlockDevice, GuestNode, LocalVm, VmConfig
from pyshim.model.volumes import Bind, DirectVolume, HostMount, VirtiofsdPlan, VolumeCopy


class SharePlan(msgspec.Struct, frozen=True, kw_only=True):
    root: HostPath
    mounts_dir: HostPath
    exported_dir: HostPath
    mounts: tuple[HostMount, ...]
    """In the order in which they are made: `mounts_dir` bound on itself and shared, then `exported_dir`, its read-only
    slave."""
    bind_mounts: tuple[HostMount, ...]
    """The mounts of `sandbox_bind_mounts`, which every guest sees."""
    directories: tuple[HostPath, ...]
    """Directories to make in the share after `mounts`."""
    virtiofsd: VirtiofsdPlan | None
    """None if guest and host share no files: `mounts` is empty then, and volumes are copied."""


class DiskUse(msgspec.Struct, frozen=True, kw_only=True):
    """A disk to plug for a container. The agent mounts it (`storage`) or gives the container its device node."""

    disk: BlockDevice
    storage: Storage | None
    """Without driver and source, which depend on the place of the plugged disk."""
    container_path: str
    """The path of the device node in the container; empty with a storage."""
    direct: DirectVolume | None = None
    """The direct volume that the disk is."""
    make_bytes: int = 0
    """If not 0, the disk's file is made with this size, and removed when the sandbox ends."""


class SandboxPlan(msgspec.Struct, frozen=True, kw_only=True):
    sandbox_id: SandboxId
    kind: ContainerKind
    config: Config
    vm: VmConfig
    share: SharePlan
    guest: GuestSandbox
    sizing: SizingRecord
    initdata: Initdata | None
    """The document that the guest reads from a disk; None if there is no such disk."""
    cgroups: CgroupPlan
    netns_path: str | None
    """The pod's network namespace on the host; None if the pod has no network of its own."""
    new_netns: bool
    """The shim makes the namespace at `netns_path`. Hooks add interfaces to it, or the caller does after Create."""
    has_network_hooks: bool
    """Hooks run before the VM is made, and may add interfaces to the namespace."""
    devices: PodDevices
    """The host's devices that are passed through when the VM starts."""
    sysctls: Mapping[str, str]
    """The pod's kernel settings, which are part of each container's spec."""
    agent_timeout_s: float
    """Seconds after the start within which the agent must answer for the first time."""
    placement: SavedPlacement | None = None
    """The VM's place on the host, if the node's plugin has chosen one."""
    warm_vm: LocalVm | None = None
    """The small VM that continues from a template and then grows to the size of `vm`; None without templates."""
    numa_why: str = ""
    """The reason for the guest's NUMA nodes in `vm.numa`, or for having one; empty without `enable_numa`."""

    @property
    def local_vm(self) -> LocalVm:
        """`vm`, of a plan whose VM is on this host."""
        assert isinstance(self.vm, LocalVm), "a remote VM has no devices, memory or processes on this host"
        return self.vm

    @property
    def numa(self) -> tuple[GuestNode, ...]:
        """As `LocalVm.numa`."""
        return self.vm.numa if isinstance(self.vm, LocalVm) else ()


class MemoryVolume(msgspec.Struct, frozen=True, kw_only=True):
    """A memory emptyDir: a tmpfs in the guest, as large as the one that the kubelet made on the host."""

    host_path: HostPath
    storage: Storage


class ContainerPlan(msgspec.Struct, frozen=True, kw_only=True):
    container_id: ContainerId
    rootfs: HostPath
    rootfs_mounts: tuple[HostMount, ...]
    """The mounts of Create.rootfs on `<bundle>/rootfs`, in order."""
    share_mounts: tuple[HostMount, ...]
    """The root file system, bound into the share."""
    share_points: tuple[HostPath, ...]
    """Directories that stay in the share after `share_mounts` are unmounted."""
    binds: tuple[Bind, ...]
    """The volumes in the share, each made for the first container that has it."""
    disks: tuple[DiskUse, ...]
    copies: tuple[VolumeCopy, ...]
    """Host files to copy into a guest that shares no files with the host."""
    termination_message: str = ""
    """The kubelet's file of which one of `copies` is; what the container writes to the copy belongs into it. Empty
    without one."""
    memory_volumes: tuple[MemoryVolume, ...] = ()
    guest: GuestContainer
    """Without the storages and devices of `disks`, whose places in the guest are known after plugging."""
