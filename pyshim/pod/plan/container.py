"""The plan of one container: its mounts on the host, its disks, the agent's mounts, and the guest's spec."""

import posixpath
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from pyshim.model.config import FILE_SYSTEM_OPTION_PREFIX, Config
from pyshim.model.errors import FailedPrecondition, InvalidArgument, Unimplemented
from pyshim.model.guest import GuestContainer
from pyshim.model.ids import ContainerId, HostPath
from pyshim.model.oci import ContainerKind, OciDevice, OciSpec, membership
from pyshim.model.plans import ContainerPlan, DiskUse, SharePlan
from pyshim.model.task import RootfsMount
from pyshim.model.vm import GuestNode
from pyshim.model.volumes import Bind, HostMount, SourceFacts, SourceKind, TargetKind
from pyshim.pod.plan.guest_spec import guest_spec
from pyshim.resources.volumes.plan.disk_volumes import block_volume
from pyshim.resources.volumes.plan.guest_pull import root_pulled_in_guest
from pyshim.resources.volumes.plan.root_disks import GuestRoot, root_disks
from pyshim.resources.volumes.plan.share import GUEST_SHARED_DIR
from pyshim.resources.volumes.plan.shared_volumes import termination_message
from pyshim.resources.volumes.plan.virtual_volume import image_on_disk, virtual_volume
from pyshim.resources.volumes.plan.volumes import volumes_plan

_DEVICE_MODE = 0o666
"""The mode of a device node whose spec names none. Source: runc and crun."""


def container_plan(
    *,
    container_id: ContainerId,
    bundle: HostPath,
    rootfs: tuple[RootfsMount, ...],
    spec: OciSpec,
    config: Config,
    share: SharePlan,
    sources: Mapping[str, SourceFacts],
    hostname: str,
    sysctls: Mapping[str, str],
    terminal: bool,
    stdin: bool,
    nodes: Sequence[GuestNode] = (),
    bound: Sequence[Bind] = (),
) -> ContainerPlan:
    """The plan. `sources` has the facts that `volumes_plan` asks for; `bound` are the binds of other containers.

    Raises InvalidArgument, FailedPrecondition or Unimplemented naming the mount.
    """
    _check_layers(rootfs)
    host_rootfs = rootfs_path(bundle, spec, has_mounts=bool(rootfs))
    volumes = volumes_plan(
        container_id=container_id, spec=spec, config=config, share=share, sources=sources, bound=bound
    )
    hosts = () if config.hypervisor.privileged_host_disks else hosts_disks(spec, sources)
    disks = (*volumes.disks, *_device_disks(spec, config, sources, hosts))
    root = _guest_root(rootfs, spec, config, container_id)
    root_mounts = () if root else (_root_share(host_rootfs, container_id, share),)
    return ContainerPlan(
        container_id=container_id,
        rootfs=host_rootfs,
        rootfs_mounts=() if root else tuple(rootfs_mount(mount, host_rootfs) for mount in rootfs),
        share_mounts=root_mounts,
        share_points=(HostPath(f"{share.mounts_dir}/{container_id}"),) if root_mounts else (),
        binds=volumes.binds,
        disks=(*root.disks, *disks) if root else disks,
        copies=volumes.copies,
        termination_message=termination_message(spec, volumes.copies),
        memory_volumes=volumes.memory_volumes,
        guest=GuestContainer(
            container_id=container_id,
            spec=guest_spec(
                spec,
                root_path=root.mount_point if root else f"{GUEST_SHARED_DIR}/{container_id}/rootfs",
                mounts=volumes.mounts,
                seccomp=not config.runtime.disable_guest_seccomp,
                hostname=hostname,
                sysctls=sysctls,
                terminal=terminal,
                stdin=stdin,
                devices=[
                    _guest_device_node(device, spec)
                    for device in spec.devices
                    if device.type in ("c", "u", "b") and device not in hosts
                ],
                nodes=nodes,
            ),
            storages=(*root.storages, *volumes.storages) if root else volumes.storages,
            devices=(),
            shared_pid_namespace=_shares_pid_namespace(spec, container_id),
        ),
    )


def _guest_root(
    rootfs: tuple[RootfsMount, ...], spec: OciSpec, config: Config, container_id: ContainerId
) -> GuestRoot | None:
    """The root file system that the guest mounts by itself; None if the host mounts and shares it."""
    volume = virtual_volume(rootfs, container_id)
    if image := volume and image_on_disk(volume, container_id):
        return root_disks(image, config, container_id)
    if pulled := root_pulled_in_guest(volume, spec, config, container_id):
        return GuestRoot(mount_point=pulled.mount_point, storages=(pulled,))
    return root_disks(rootfs, config, container_id)


def _shares_pid_namespace(spec: OciSpec, container_id: ContainerId) -> bool:
    """True for a container that shares a pid namespace with others of its pod.

    A path in the spec names the sandbox's namespace, or that of another container. hostPID counts as sharing, too: it
    asks for the host's namespace under CRI-O and cri-dockerd, for the sandbox's under containerd.
    """
    if spec.is_in_hosts("pid"):
        return membership(spec.annotations, container_id).kind is ContainerKind.POD_CONTAINER
    return bool(spec.namespace_path("pid"))


def _root_share(host_rootfs: HostPath, container_id: ContainerId, share: SharePlan) -> HostMount:
    if share.virtiofsd is None:
        raise FailedPrecondition(
            f"create container '{container_id}': shared_fs = \"none\" leaves no way to its root file system: it has to "
            "be on a disk (a block snapshotter) or pulled in the guest (experimental_force_guest_pull)"
        )
    return HostMount(
        type="bind",
        source=host_rootfs,
        target=HostPath(f"{share.mounts_dir}/{container_id}/rootfs"),
        target_kind=TargetKind.DIRECTORY,
        options=("rbind", "rslave"),
        propagation=None,
        beneath=share.mounts_dir,
    )


def without_image(plan: ContainerPlan) -> ContainerPlan:
    """`plan` without anything to mount, share or plug, for a container that the shim answers for."""
    without = replace(plan, rootfs_mounts=(), share_mounts=(), share_points=(), binds=(), disks=())
    return replace(without, copies=(), termination_message="")


def rootfs_path(bundle: HostPath, spec: OciSpec, *, has_mounts: bool) -> HostPath:
    """The root file system on the host: `<bundle>/rootfs` if containerd passes mounts, else the spec's `root.path`.

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


def _check_layers(rootfs: tuple[RootfsMount, ...]) -> None:
    """Raises Unimplemented for layers that the guest would have to mount: the root would lack their files."""
    for mount in rootfs:
        for option in mount.options:
            if option.startswith(FILE_SYSTEM_OPTION_PREFIX):
                name = option.partition("=")[0]
                raise Unimplemented(
                    f"mount root file system '{mount.source}': option '{name}' of a block snapshotter is not supported"
                )


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


def hosts_disks(spec: OciSpec, sources: Mapping[str, SourceFacts]) -> tuple[OciDevice, ...]:
    """Block devices that come with "all devices are allowed": callers list every one of the host for a privileged
    container, at its own path. One that the container asks for has a rule of its own, or another path.
    """
    rules = _device_rules(spec)
    if not any(rule.get("allow") and _is_for_all(rule) for rule in rules):
        return ()
    named = {(rule.get("major"), rule.get("minor")) for rule in rules if rule.get("allow")}
    return tuple(
        device
        for device in spec.devices
        if device.type == "b"
        and (device.major, device.minor) not in named
        and sources[f"/dev/block/{device.major}:{device.minor}"].device_path in ("", device.path)
    )


def _is_for_all(rule: Mapping[str, Any]) -> bool:
    kind, numbers = rule.get("type") or "a", (rule.get("major", -1), rule.get("minor", -1))
    return kind in ("a", "b") and all(number in (None, -1) for number in numbers)


def _device_rules(spec: OciSpec) -> list[Mapping[str, Any]]:
    resources = (spec.raw.get("linux") or {}).get("resources") or {}
    return [rule for rule in resources.get("devices") or [] if isinstance(rule, dict)]


def _device_disks(
    spec: OciSpec, config: Config, sources: Mapping[str, SourceFacts], hosts: Collection[OciDevice]
) -> tuple[DiskUse, ...]:
    """The block devices of linux.devices that are not the host's own.

    The host's device is found by its number; `path` is in the container.
    """
    found = []
    for device in spec.devices:
        if device.type != "b" or device in hosts:
            continue
        facts = sources[f"/dev/block/{device.major}:{device.minor}"]
        if facts.kind is not SourceKind.BLOCK:
            raise FailedPrecondition(
                f"add device '{device.path}': the host has no block device {device.major}:{device.minor}"
            )
        volume = block_volume(config, facts, read_only=_is_read_only(device, spec))
        found.append(DiskUse(disk=volume, storage=None, container_path=device.path))
    return tuple(found)


def _is_read_only(device: OciDevice, spec: OciSpec) -> bool:
    """True when a device rule allows the device without write access."""
    for rule in _device_rules(spec):
        if rule.get("allow") and rule.get("major") == device.major and rule.get("minor") == device.minor:
            return "w" not in rule.get("access", "rwm")
    return False


def _guest_device_node(device: OciDevice, spec: OciSpec) -> Mapping[str, Any]:
    """The spec's device with a mode, since kata-agent makes a node without permissions if the spec has none."""
    for raw in (spec.raw.get("linux") or {}).get("devices") or []:
        if raw.get("path") == device.path:
            return {**raw, "fileMode": raw.get("fileMode") or _DEVICE_MODE}
    raise InvalidArgument(f"read spec: device {device.path!r} is not in linux.devices")
