"""One volume as its kind plans it, and the parts that several kinds share. Pure."""

import posixpath

import msgspec

from pyshim.model.guest import Storage
from pyshim.model.ids import GuestPath
from pyshim.model.oci import OciMount
from pyshim.model.plans import DiskUse, MemoryVolume
from pyshim.model.volumes import Bind, SourceFacts, VolumeCopy
from pyshim.resources.volumes.plan.disks import digest
from pyshim.resources.volumes.plan.share import GUEST_SANDBOX_DIR


class Volume(msgspec.Struct, frozen=True, kw_only=True):
    """A mount as the guest makes it, and what must exist before: on the host, in the VM, in the guest."""

    mount: OciMount
    binds: tuple[Bind, ...] = ()
    storages: tuple[Storage, ...] = ()
    memory_volumes: tuple[MemoryVolume, ...] = ()
    disks: tuple[DiskUse, ...] = ()
    copies: tuple[VolumeCopy, ...] = ()


def moved(mount: OciMount, source: str, options: tuple[str, ...]) -> OciMount:
    """The mount of `source`, one mount in the guest: there recursive read-only is read-only."""
    words = tuple("ro" if word == "rro" else word for word in options)
    return OciMount(destination=mount.destination, type="bind", source=GuestPath(source), options=words)


def made_directory(path: GuestPath, facts: SourceFacts) -> Storage:
    """A directory that the guest makes, with the mode and group of the host's; it lives as long as the sandbox."""
    return Storage(
        driver="local",
        driver_options=(),
        source="local",
        fs_type="local",
        options=(f"mode={facts.mode & 0o7777:o}", *group_option(facts)),
        mount_point=path,
        shared=True,
    )


def group_option(facts: SourceFacts) -> tuple[str, ...]:
    """The volume's fsGroup, which the kubelet gave the host's directory."""
    return (f"fsgid={facts.gid}",) if facts.gid else ()


def point_in_guest(kind: str, path: str) -> GuestPath:
    return GuestPath(f"{GUEST_SANDBOX_DIR}/{kind}/{short_name(path)}-{digest(path)}")


def short_name(path: str) -> str:
    """A part of `path` that a reader recognises, short enough for a file name."""
    return posixpath.basename(path).encode()[:100].decode(errors="ignore") or "root"
