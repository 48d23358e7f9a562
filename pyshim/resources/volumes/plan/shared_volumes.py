"""Volumes that are files of the host: bound into the share, or copied where guest and host share no files. Pure.

A bind has a place: where the mount table has what it binds. With /srv/a bound as volumes/volume-X-a, a volume /srv/a/b
gets no bind of its own but the path volumes/volume-X-a/b: the former is the bind `around` it. `shared` finds the bind
around a subPath of an emptyDir, which is the whole of that emptyDir; `by_one_bind` those among a pod's other binds.
"""

import posixpath
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import replace

from pyshim.model.errors import FailedPrecondition
from pyshim.model.guest import Storage
from pyshim.model.ids import ContainerId, GuestPath, HostPath
from pyshim.model.oci import OciMount, OciSpec
from pyshim.model.plans import SharePlan
from pyshim.model.volumes import Bind, HostMount, SourceFacts, SourceKind, TargetKind, VolumeCopy
from pyshim.resources.volumes.plan.disks import digest
from pyshim.resources.volumes.plan.share import GUEST_SHARED_DIR, GUEST_VOLUMES_DIR, WATCHABLE_DIR
from pyshim.resources.volumes.plan.volume import Volume, moved, short_name

_WATCHED_PLUGINS = tuple(f"/kubernetes.io~{plugin}/" for plugin in ("configmap", "secret", "projected", "downward-api"))
"""Volumes the kubelet rewrites while they are in use; Kata has the guest follow them by copying."""
TERMINATION_MESSAGE_PATH = "io.kubernetes.container.terminationMessagePath"
"""The kubelet's annotation of a container: where in the container its termination message is to be written."""
_FROM_HOST = ("private", "rprivate", "slave", "rslave", "shared", "rshared", "unbindable", "runbindable")


def shared(
    mount: OciMount,
    facts: SourceFacts,
    container_id: ContainerId,
    share: SharePlan,
    whole: SourceFacts | None = None,
) -> Volume:
    """The host's directory or file in the guest: by the share where there is one, else as a copy.

    `whole` are the facts of the emptyDir of which the source is a subPath: that is shared whole, since it belongs to
    the pod alone, so that containers with it and with a part of it have the same files.
    """
    if share.virtiofsd is None:
        return _copied(mount, facts)
    bind = _bind(mount, facts, share)
    shown = _in_guest(bind)
    if whole is not None and facts.empty_dir is not None and bind.is_one_mount:
        around = _bind(replace(mount, source=HostPath(facts.empty_dir.path)), whole, share)
        if _reaches(around, bind):
            bind, shown = around, _below(around, bind)
    if facts.kind is SourceKind.DIRECTORY and mount.is_read_only and _is_watched(mount.source):
        storage = _watched(bind, container_id)
        return Volume(mount=moved(mount, storage.mount_point, mount.options), binds=(bind,), storages=(storage,))
    return Volume(mount=moved(mount, shown, _guest_options(mount, facts)), binds=(bind,))


def by_one_bind(volumes: Sequence[Volume], bound: Sequence[Bind]) -> list[Volume]:
    """The volumes, those that lie in another's bind by a path below it: one of `bound`, or one of their own.

    virtiofsd tells the files of two mounts apart: a file that is reached by two binds is two files in the guest, with
    locks, sockets, pipes and mappings of their own.
    """
    own = [bind for volume in volumes for bind in volume.binds]
    around: dict[str, list[tuple[int, Bind]]] = defaultdict(list)
    for rank, bind in enumerate((*bound, *sorted(own, key=lambda bind: len(bind.place)))):
        if bind.reaches_below:
            around[bind.place].append((rank, bind))
    return [_by_one_of(volume, around) for volume in volumes]


def _by_one_of(volume: Volume, around: Mapping[str, Sequence[tuple[int, Bind]]]) -> Volume:
    """`around` has the binds that may do, by place, each with its rank: the lowest is taken."""
    if not volume.binds or volume.storages:
        return volume
    (bind,) = volume.binds
    above = (each for place in _with_parents(bind.place) for each in around.get(place, ()))
    _, found = min((each for each in above if _reaches(each[1], bind)), default=(0, bind))
    shown = _below(found, bind) + volume.mount.source.removeprefix(_in_guest(bind))
    storages = (_mounted_first(found),) if found.is_directory else ()
    return replace(volume, mount=replace(volume.mount, source=shown), binds=(found,), storages=storages)


def _mounted_first(bind: Bind) -> Storage:
    """The volume's mount in the agent's mount namespace, from which containers get theirs.

    The kernel mounts a bind of the share as a file system of its own (FUSE's submounts) where a path first leads into
    it. If that were in each container's namespace, each would have another file system with other inodes.
    """
    return Storage(
        driver="virtio-fs",
        driver_options=(),
        source=f"{GUEST_SHARED_DIR}/{posixpath.basename(bind.mount.target)}",
        fs_type="bind",
        options=("rbind",),
        mount_point=_in_guest(bind),
    )


def _reaches(around: Bind, bind: Bind) -> bool:
    """A path below `around` leads to what `bind` is, as writable and executable as by `bind`."""
    is_in = around.place and (bind.place == around.place or bind.place.startswith(f"{around.place}/"))
    return bool(is_in) and around.reaches_below and bind.is_one_mount and around.mount_flags == bind.mount_flags


def _with_parents(place: str) -> Iterator[str]:
    while place:
        yield place
        place = place.rpartition("/")[0]


def _below(around: Bind, bind: Bind) -> GuestPath:
    return GuestPath(_in_guest(around) + bind.place.removeprefix(around.place))


def _in_guest(bind: Bind) -> GuestPath:
    above = GUEST_VOLUMES_DIR if bind.is_directory else GUEST_SHARED_DIR
    return GuestPath(f"{above}/{posixpath.basename(bind.mount.target)}")


def _bind(mount: OciMount, facts: SourceFacts, share: SharePlan) -> Bind:
    """The bind of the source into the share, equal for all containers for which one bind will do.

    Only a source that is another directory by now, or the mounts below it, make it another bind.
    """
    propagation = _propagation(mount)
    # An emptyDir belongs to the pod, whose VM may write to it anyway: containers that differ in `ro` have one bind.
    read_only = () if facts.empty_dir is not None and not _has_several(mount, facts) else _read_only(mount)
    options = ("rbind", *read_only, propagation)
    seen_once = facts.mounts_below if propagation == "rprivate" else facts.mount_id
    name = f"volume-{digest(repr((mount.source, facts.identity, options, seen_once)))}-{short_name(mount.source)}"
    return Bind(
        mount=HostMount(
            type="bind",
            source=mount.source,
            target=HostPath(f"{share.mounts_dir}/{name}"),
            target_kind=TargetKind.LIKE_SOURCE,
            options=options,
            propagation=None,
            beneath=share.mounts_dir,
            for_guest_only=propagation == "rprivate" and bool(facts.mounts_below),
        ),
        place=facts.place,
        mount_flags=facts.mount_flags,
        is_directory=facts.kind is SourceKind.DIRECTORY,
        is_one_mount=propagation == "rprivate" and not facts.mounts_below and not mount.is_read_only_recursive,
    )


def _guest_options(mount: OciMount, facts: SourceFacts) -> tuple[str, ...]:
    """The mount's options; without `ro` if it applies to the topmost of several mounts only, as the host enforces.

    The guest sees the host's several mounts as one, so its `ro` would apply to all of them.
    """
    if _has_several(mount, facts) and not mount.is_read_only_recursive:
        return tuple(word for word in mount.options if word != "ro")
    return mount.options


def _has_several(mount: OciMount, facts: SourceFacts) -> bool:
    """The volume is several mounts of the host, now or later."""
    return facts.kind is SourceKind.DIRECTORY and (bool(facts.mounts_below) or _propagation(mount) == "rslave")


def _watched(bind: Bind, container_id: ContainerId) -> Storage:
    """The container's own copy, which follows the directory: kata-agent stops with the first user of a copy."""
    name = posixpath.basename(bind.mount.target)
    return Storage(
        driver="watchable-bind",
        driver_options=(),
        source=f"{GUEST_SHARED_DIR}/{name}",
        fs_type="bind",
        options=("rbind", "ro"),
        mount_point=GuestPath(f"{GUEST_SHARED_DIR}/{WATCHABLE_DIR}/{container_id}-{name}"),
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


def termination_message(spec: OciSpec, copies: Sequence[VolumeCopy]) -> str:
    """The kubelet's file for the container's termination message, if the guest has a copy of it; empty otherwise.

    The kubelet mounts it on the path of its annotation. Of several mounts there the last is what the container sees.
    """
    point = spec.annotations.get(TERMINATION_MESSAGE_PATH)
    if not point:
        return ""
    there = [mount for mount in spec.mounts if posixpath.normpath(mount.destination) == posixpath.normpath(point)]
    is_copy = there and not there[-1].is_read_only and any(copy.source == there[-1].source for copy in copies)
    return there[-1].source if is_copy else ""


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
