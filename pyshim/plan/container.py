"""The plan of one container: what the host mounts into the share, what the agent mounts, the spec it runs."""

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hypervisors.base import BlockDevice
from pyshim.model.config import Config
from pyshim.model.errors import FailedPrecondition, InvalidArgument
from pyshim.model.guest import GuestContainer, GuestDevice
from pyshim.model.ids import ContainerId, GuestPath, HostPath
from pyshim.model.mounts import HostMount, SourceKind, TargetKind
from pyshim.model.oci import OciDevice, OciMount, OciSpec
from pyshim.model.task import RootfsMount
from pyshim.plan.disks import digest, disk
from pyshim.plan.guest_spec import guest_spec
from pyshim.plan.share import GUEST_SANDBOX_DIR, GUEST_SHARED_DIR, SharePlan

_GUEST_OWN_TREES = ("/proc", "/sys", "/dev")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockVolume:
    """A host block device the container gets as a device node: plugged into the VM, then handed to the agent."""

    disk: BlockDevice
    container_path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerPlan:
    container_id: ContainerId
    rootfs: HostPath
    rootfs_mounts: tuple[HostMount, ...]
    """Create.rootfs on `<bundle>/rootfs`, in order."""
    share_mounts: tuple[HostMount, ...]
    """The root file system and each volume, bound into the share."""
    share_points: tuple[HostPath, ...]
    """What the targets of `share_mounts` leave in the share once unmounted."""
    block_volumes: tuple[BlockVolume, ...]
    guest: GuestContainer
    """Complete but for the devices of `block_volumes`, whose guest addresses are known once plugged."""


def container_plan(
    *,
    container_id: ContainerId,
    bundle: HostPath,
    rootfs: tuple[RootfsMount, ...],
    spec: OciSpec,
    config: Config,
    share: SharePlan,
    sources: Mapping[str, SourceKind],
    hostname: str,
    sysctls: Mapping[str, str],
    terminal: bool,
) -> ContainerPlan:
    """The plan; `sources` holds the kind of every path in `volume_sources(spec)` and of every device's host path.

    Raises InvalidArgument or FailedPrecondition naming the mount.
    """
    host_rootfs = rootfs_path(bundle, spec, has_mounts=bool(rootfs))
    volumes = _Volumes(container_id, share)
    mounts = tuple(volumes.add(mount, sources) for mount in spec.mounts if not _is_cgroup(mount))
    root_share = HostMount(
        type="bind",
        source=host_rootfs,
        target=HostPath(f"{share.mounts_dir}/{container_id}/rootfs"),
        target_kind=TargetKind.DIRECTORY,
        options=("rbind",),
        propagation=None,
        beneath=share.mounts_dir,
    )
    return ContainerPlan(
        container_id=container_id,
        rootfs=host_rootfs,
        rootfs_mounts=tuple(rootfs_mount(mount, host_rootfs) for mount in rootfs),
        share_mounts=(root_share, *volumes.host_mounts),
        share_points=(
            HostPath(f"{share.mounts_dir}/{container_id}"),
            *(mount.target for mount in volumes.host_mounts),
        ),
        block_volumes=tuple(
            _block_volume(device, spec, container_id, config) for device in spec.devices if device.type == "b"
        ),
        guest=GuestContainer(
            container_id=container_id,
            spec=guest_spec(
                spec,
                root_path=f"{GUEST_SHARED_DIR}/{container_id}/rootfs",
                mounts=mounts,
                seccomp=not config.runtime.disable_guest_seccomp,
                hostname=hostname,
                sysctls=sysctls,
                terminal=terminal,
                devices=[_guest_device_node(device, spec) for device in spec.devices if device.type in ("c", "u", "b")],
            ),
            storages=(),
            devices=(),
            # A path is the sandbox's namespace on the host, or that of a container in it: the guest has one for all.
            shared_pid_namespace=bool(spec.namespace_path("pid")),
        ),
    )


def without_image(plan: ContainerPlan) -> ContainerPlan:
    """`plan` of a container that exists on the host by name only: nothing to mount, share or plug."""
    return replace(plan, rootfs_mounts=(), share_mounts=(), share_points=(), block_volumes=())


def with_devices(guest: GuestContainer, devices: tuple[GuestDevice, ...]) -> GuestContainer:
    """`guest` with devices whose guest addresses are now known."""
    return replace(guest, devices=devices)


def rootfs_path(bundle: HostPath, spec: OciSpec, *, has_mounts: bool) -> HostPath:
    """The root file system on the host: `<bundle>/rootfs` when containerd gave mounts, else the spec's `root.path`.

    A relative path is relative to the bundle (OCI config.md, "root") and must stay below it.
    """
    if has_mounts:
        return HostPath(f"{bundle}/rootfs")
    if spec.root_path.startswith("/"):
        return HostPath(posixpath.normpath(spec.root_path))
    path = posixpath.normpath(f"{bundle}/{spec.root_path}")
    if not path.startswith(f"{posixpath.normpath(bundle)}/"):
        raise InvalidArgument(f"read spec '{bundle}/config.json': root.path {spec.root_path!r} leaves the bundle")
    return HostPath(path)


def rootfs_mount(mount: RootfsMount, host_rootfs: HostPath) -> HostMount:
    """One mount of Create.rootfs; its `target`, if any, is a path below the root file system."""
    target = host_rootfs
    if mount.target.strip("/"):
        target = HostPath(posixpath.normpath(f"{host_rootfs}/{mount.target}"))
        if not target.startswith(f"{host_rootfs}/"):
            raise InvalidArgument(f"mount '{mount.source}': target {mount.target!r} leaves the root file system")
    return HostMount(
        type=mount.type,
        source=mount.source,
        target=target,
        target_kind=TargetKind.DIRECTORY,
        options=mount.options,
        propagation=None,
        beneath=host_rootfs if target != host_rootfs else None,
    )


def volume_sources(spec: OciSpec) -> tuple[str, ...]:
    """Host paths whose kind the plan needs to know."""
    return tuple(mount.source for mount in spec.mounts if mount.is_bind and mount.source.startswith("/"))


class _Volumes:
    """Collects what each mount of the spec needs on the host and in the guest."""

    def __init__(self, container_id: ContainerId, share: SharePlan) -> None:
        self._container_id = container_id
        self._share = share
        self.host_mounts: tuple[HostMount, ...] = ()

    def add(self, mount: OciMount, sources: Mapping[str, SourceKind]) -> OciMount:
        """The mount as the guest makes it; whatever the host must do first is collected."""
        if mount.destination == "/dev/shm":
            return _moved(mount, f"{GUEST_SANDBOX_DIR}/shm", ("rbind",))
        if not mount.is_bind:
            return mount
        if not mount.source.startswith("/"):
            raise InvalidArgument(f"mount volume on '{mount.destination}': source {mount.source!r} is not absolute")
        kind = sources[mount.source]
        if kind is SourceKind.MISSING:
            raise FailedPrecondition(f"mount volume '{mount.source}' on '{mount.destination}': ENOENT (no such file)")
        if kind is not SourceKind.FILE and _is_guest_own(mount.source):
            return mount
        return self._share_volume(mount)

    def _share_volume(self, mount: OciMount) -> OciMount:
        name = f"{self._container_id}-{digest(mount.destination)}-{_short_name(mount.source)}"
        self.host_mounts += (
            HostMount(
                type="bind",
                source=mount.source,
                target=HostPath(f"{self._share.mounts_dir}/{name}"),
                target_kind=TargetKind.LIKE_SOURCE,
                options=("rbind", "ro") if mount.is_read_only else ("rbind",),
                propagation=None,
                beneath=self._share.mounts_dir,
            ),
        )
        return _moved(mount, f"{GUEST_SHARED_DIR}/{name}", mount.options)


def _moved(mount: OciMount, source: str, options: tuple[str, ...]) -> OciMount:
    return OciMount(destination=mount.destination, type="bind", source=GuestPath(source), options=options)


def _is_guest_own(source: str) -> bool:
    """Kernel trees are the guest's own: sharing the host's /proc, /sys or /dev would mean the wrong machine."""
    return any(source == tree or source.startswith(f"{tree}/") for tree in _GUEST_OWN_TREES)


def _is_cgroup(mount: OciMount) -> bool:
    return mount.type == "bind" and mount.source.startswith("/sys/fs/cgroup")


def _block_volume(device: OciDevice, spec: OciSpec, container_id: ContainerId, config: Config) -> BlockVolume:
    return BlockVolume(
        disk=disk(
            config,
            device_id=f"blk-{digest(f'{container_id}:{device.path}')}",
            path=device.path,
            read_only=_is_read_only(device, spec),
        ),
        container_path=device.path,
    )


def _is_read_only(device: OciDevice, spec: OciSpec) -> bool:
    """A device is read-only when a device rule names it without the write access."""
    resources = (spec.raw.get("linux") or {}).get("resources") or {}
    for rule in resources.get("devices") or []:
        if rule.get("allow") and rule.get("major") == device.major and rule.get("minor") == device.minor:
            return "w" not in rule.get("access", "rwm")
    return False


def _guest_device_node(device: OciDevice, spec: OciSpec) -> Mapping[str, Any]:
    for raw in (spec.raw.get("linux") or {}).get("devices") or []:
        if raw.get("path") == device.path:
            return dict(raw)
    raise InvalidArgument(f"read spec: device {device.path!r} is not in linux.devices")


def _short_name(path: str) -> str:
    """What a person will recognise `path` by, short enough to be part of a file name."""
    return posixpath.basename(path).encode()[:100].decode(errors="ignore") or "root"
