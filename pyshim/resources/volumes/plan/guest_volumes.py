"""Volumes that the guest makes: emptyDirs in memory and in its file system, huge pages, /dev/shm. Pure."""

from pyshim.model.errors import InvalidArgument
from pyshim.model.guest import Storage
from pyshim.model.ids import GuestPath, HostPath
from pyshim.model.oci import OciMount, OciSpec
from pyshim.model.plans import MemoryVolume
from pyshim.model.units import GIB, KIB, MIB
from pyshim.model.volumes import EmptyDir, SourceFacts
from pyshim.resources.volumes.plan.share import GUEST_SANDBOX_DIR
from pyshim.resources.volumes.plan.volume import Volume, group_option, made_directory, moved, point_in_guest


def shared_memory(mount: OciMount) -> Volume:
    """The pod's /dev/shm. crun does not take over the flags of what it binds, so they are named."""
    return Volume(mount=moved(mount, f"{GUEST_SANDBOX_DIR}/shm", ("rbind", "nosuid", "nodev", "noexec")))


def memory_empty_dir(mount: OciMount, facts: SourceFacts, empty_dir: EmptyDir) -> Volume:
    """A tmpfs of the guest's, as large as the one the kubelet made on the host, which stays empty."""
    top = point_in_guest("ephemeral", empty_dir.path)
    # The kubelet's tmpfs has the mode 0777; a subPath's directory may have another.
    mode = facts.mode & 0o7777 if not empty_dir.sub_path else 0o777
    size = (f"size={facts.size_bytes}",) if facts.size_bytes else ()
    tmpfs = _ephemeral("tmpfs", "tmpfs", (*size, f"mode={mode:o}", *group_option(facts)), top)
    resized = (MemoryVolume(host_path=HostPath(empty_dir.path), storage=tmpfs),)
    if not empty_dir.sub_path:
        return Volume(mount=moved(mount, top, mount.options), storages=(tmpfs,), memory_volumes=resized)
    below = GuestPath(f"{top}/{empty_dir.sub_path}")
    storages = (tmpfs, made_directory(below, facts))
    return Volume(mount=moved(mount, below, mount.options), storages=storages, memory_volumes=resized)


def guest_empty_dir(mount: OciMount, facts: SourceFacts, empty_dir: EmptyDir) -> Volume:
    """A directory of the guest's own file system."""
    point = point_in_guest("local", empty_dir.path)
    return Volume(mount=moved(mount, point, mount.options), storages=(made_directory(point, facts),))


def huge_pages(mount: OciMount, facts: SourceFacts, spec: OciSpec) -> Volume:
    """Huge pages of the guest's, as many bytes as the container may have of this page size."""
    size_bytes = _hugepage_limit(spec, facts.page_bytes) or facts.size_bytes
    if not size_bytes:
        raise InvalidArgument(
            f"mount huge pages on '{mount.destination}': neither linux.resources.hugepageLimits nor the host's "
            f"'{mount.source}' says how many pages of {facts.page_bytes} bytes"
        )
    point = point_in_guest("ephemeral", facts.empty_dir.path if facts.empty_dir else mount.source)
    options = (f"pagesize={facts.page_bytes}", f"size={size_bytes}")
    return Volume(
        mount=moved(mount, point, mount.options), storages=(_ephemeral("nodev", "hugetlbfs", options, point),)
    )


def _ephemeral(source: str, fs_type: str, options: tuple[str, ...], point: GuestPath) -> Storage:
    return Storage(
        driver="ephemeral",
        driver_options=(),
        source=source,
        fs_type=fs_type,
        options=options,
        mount_point=point,
        shared=True,
    )


def _hugepage_limit(spec: OciSpec, page_bytes: int) -> int:
    """Bytes the container may have in pages of this size; 0 without a limit in its resources."""
    resources = (spec.raw.get("linux") or {}).get("resources") or {}
    limits = resources.get("hugepageLimits") or []
    units = {"KB": KIB, "MB": MIB, "GB": GIB}
    for limit in limits if isinstance(limits, list) else []:
        size = limit.get("pageSize", "") if isinstance(limit, dict) else ""
        if isinstance(size, str) and size[:-2].isdecimal() and size[-2:] in units:
            amount = limit.get("limit", 0)
            if int(size[:-2]) * units[size[-2:]] == page_bytes and isinstance(amount, int):
                return amount
    return 0
