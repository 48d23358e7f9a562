"""Volumes that are files of the host: bound into the share, or copied where guest and host share no files. Pure."""

from pyshim.model.errors import FailedPrecondition
from pyshim.model.guest import Storage
from pyshim.model.ids import ContainerId, GuestPath, HostPath
from pyshim.model.oci import OciMount
from pyshim.model.plans import SharePlan
from pyshim.model.volumes import HostMount, SourceFacts, SourceKind, TargetKind, VolumeCopy
from pyshim.resources.volumes.plan.disks import digest
from pyshim.resources.volumes.plan.share import GUEST_SHARED_DIR, WATCHABLE_DIR
from pyshim.resources.volumes.plan.volume import Volume, moved, short_name

_WATCHED_PLUGINS = tuple(f"/kubernetes.io~{plugin}/" for plugin in ("configmap", "secret", "projected", "downward-api"))
"""Volumes the kubelet rewrites while they are in use; Kata has the guest follow them by copying."""
_FROM_HOST = ("private", "rprivate", "slave", "rslave", "shared", "rshared", "unbindable", "runbindable")


def shared(mount: OciMount, facts: SourceFacts, container_id: ContainerId, share: SharePlan) -> Volume:
    """The host's directory or file in the guest: by the share where there is one, else as a copy."""
    if share.virtiofsd is None:
        return _copied(mount, facts)
    name = f"{container_id}-{digest(mount.destination)}-{short_name(mount.source)}"
    propagation = _propagation(mount)
    bind = HostMount(
        type="bind",
        source=mount.source,
        target=HostPath(f"{share.mounts_dir}/{name}"),
        target_kind=TargetKind.LIKE_SOURCE,
        options=("rbind", *_read_only(mount), propagation),
        propagation=None,
        beneath=share.mounts_dir,
        for_guest_only=propagation == "rprivate" and facts.has_mounts_below,
    )
    shown = f"{GUEST_SHARED_DIR}/{name}"
    if facts.kind is SourceKind.DIRECTORY and mount.is_read_only and _is_watched(mount.source):
        storage = _watched(name, shown)
        return Volume(mount=moved(mount, storage.mount_point, mount.options), host_mounts=(bind,), storages=(storage,))
    return Volume(mount=moved(mount, shown, _guest_options(mount, facts, propagation)), host_mounts=(bind,))


def _guest_options(mount: OciMount, facts: SourceFacts, propagation: str) -> tuple[str, ...]:
    """The mount's options; without `ro` if it applies to the topmost of several mounts only, as the host enforces.

    The guest sees the host's several mounts as one, so its `ro` would apply to all of them.
    """
    has_several = facts.has_mounts_below or propagation == "rslave"
    if facts.kind is SourceKind.DIRECTORY and has_several and not mount.is_read_only_recursive:
        return tuple(word for word in mount.options if word != "ro")
    return mount.options


def _watched(name: str, source: str) -> Storage:
    """The guest's copy of the directory, which follows it."""
    return Storage(
        driver="watchable-bind",
        driver_options=(),
        source=source,
        fs_type="bind",
        options=("rbind", "ro"),
        mount_point=GuestPath(f"{GUEST_SHARED_DIR}/{WATCHABLE_DIR}/{name}"),
    )


def _copied(mount: OciMount, facts: SourceFacts) -> Volume:
    """A copy in the guest, one for all containers of the pod that have it. Devices and sockets have none."""
    if facts.kind not in (SourceKind.DIRECTORY, SourceKind.FILE):
        raise FailedPrecondition(
            f"mount volume '{mount.source}' on '{mount.destination}': "
            'shared_fs = "none" copies directories and files only'
        )
    path = GuestPath(f"{GUEST_SHARED_DIR}/copy-{digest(mount.source)}-{short_name(mount.source)}")
    follows = facts.kind is SourceKind.DIRECTORY and _is_watched(mount.source)
    copy = VolumeCopy(source=mount.source, guest_path=path, follows=follows)
    return Volume(mount=moved(mount, path, mount.options), copies=(copy,))


def _propagation(mount: OciMount) -> str:
    """`rslave` when later mounts on the host reach the share, `rprivate` when they do not.

    A guest's mounts stay in the guest, so `shared` is `slave`. It is never left as the source has it: an unmount of the
    share would then unmount the same directory of the host.
    """
    words = [word for word in mount.options if word in _FROM_HOST]
    return "rslave" if words and words[-1].lstrip("r") in ("slave", "shared") else "rprivate"


def _read_only(mount: OciMount) -> tuple[str, ...]:
    if mount.is_read_only_recursive:
        return ("rro",)
    return ("ro",) if mount.is_read_only else ()


def _is_watched(source: str) -> bool:
    return any(plugin in source for plugin in _WATCHED_PLUGINS)
