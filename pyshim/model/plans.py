"""The plans of one sandbox and of one container: built by `pod/plan`, carried out by the parts of a pod."""

from collections.abc import Mapping

import msgspec

from pyshim.model.cgroups import CgroupPlan
from pyshim.model.confidential import Initdata
from pyshim.model.config import Config
from pyshim.model.copies import VolumeCopy
from pyshim.model.devices import PodDevices
from pyshim.model.guest import GuestContainer, GuestSandbox, Storage
from pyshim.model.ids import ContainerId, HostPath, SandboxId
from pyshim.model.kind import ContainerKind
from pyshim.model.mounts import HostMount
from pyshim.model.placement import Placed
from pyshim.model.sizing import SizingRecord
from pyshim.model.vm import BlockDevice, VmConfig
from pyshim.model.volumes import DirectVolume, VirtiofsdPlan


class SharePlan(msgspec.Struct, frozen=True, kw_only=True):
    root: HostPath
    mounts_dir: HostPath
    exported_dir: HostPath
    mounts: tuple[HostMount, ...]
    """To be made in order: `mounts` bound on itself and shared, then its read-only slave."""
    bind_mounts: tuple[HostMount, ...]
    """`sandbox_bind_mounts`: shown to the guest beside every container's own."""
    directories: tuple[HostPath, ...]
    """To be made in the share, once `mounts` are there."""
    virtiofsd: VirtiofsdPlan | None
    """None when guest and host share no files: then `mounts` is empty, and volumes are copied."""


class DiskUse(msgspec.Struct, frozen=True, kw_only=True):
    """A disk to be plugged for a container, and what the agent then does with it: one of the two."""

    disk: BlockDevice
    storage: Storage | None
    """Complete but for driver and source, which the plugged disk's place decides."""
    container_path: str
    """Path of the device node in the container; empty with a storage."""
    direct: DirectVolume | None = None
    """The direct volume it is, if it is one."""
    make_bytes: int = 0
    """The file is made with this size and removed with the sandbox: its content outlives containers."""


class SandboxPlan(msgspec.Struct, frozen=True, kw_only=True):
    sandbox_id: SandboxId
    kind: ContainerKind
    config: Config
    vm: VmConfig
    share: SharePlan
    guest: GuestSandbox
    sizing: SizingRecord
    initdata: Initdata | None
    """The document that the guest reads from a disk."""
    cgroups: CgroupPlan
    netns_path: str | None
    """The pod's network namespace on the host; None when the pod has no network of its own."""
    new_netns: bool
    """The shim makes the namespace at `netns_path`, for hooks to fill."""
    devices: PodDevices
    """The host's devices that are passed through from the start."""
    sysctls: Mapping[str, str]
    """Kernel settings of the pod, which each container's creation makes sure of."""
    agent_timeout_s: float
    """Seconds until the guest's agent must have answered for the first time."""
    placement: Placed | None = None
    """Its place on the host, if the node's plugin has given one."""
    warm_vm: VmConfig | None = None
    """The VM as one that continues from a template and then grows to the size of `vm`; None without templates."""
    numa_why: str = ""
    """The reason for the NUMA nodes of `vm.numa`, or for one node; empty without `enable_numa`."""


class MemoryVolume(msgspec.Struct, frozen=True, kw_only=True):
    """A memory emptyDir: the guest's tmpfs, as large as the one that the kubelet made on the host."""

    host_path: HostPath
    storage: Storage


class ContainerPlan(msgspec.Struct, frozen=True, kw_only=True):
    container_id: ContainerId
    rootfs: HostPath
    rootfs_mounts: tuple[HostMount, ...]
    """Create.rootfs on `<bundle>/rootfs`, in order."""
    share_mounts: tuple[HostMount, ...]
    """The root file system and each volume, bound into the share."""
    share_points: tuple[HostPath, ...]
    """Files and directories that remain in the share once `share_mounts` are unmounted."""
    disks: tuple[DiskUse, ...]
    copies: tuple[VolumeCopy, ...]
    """Host files the guest has copies of, where it shares none with the host."""
    memory_volumes: tuple[MemoryVolume, ...] = ()
    guest: GuestContainer
    """Complete but for what `disks` add: storages and devices whose places in the guest are known once plugged."""
