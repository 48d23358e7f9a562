"""The directory tree a sandbox shares with its guest, and the virtiofsd that serves it.

Host: /run/kata-containers/shared/sandboxes/<sid>/{mounts,shared}: `mounts` is the source of truth, `shared` the
read-only slave bind of it that virtiofsd exports. Guest: tag `kataShared` on GUEST_SHARED_DIR. The layout and the names
are Kata's (its operators look there).
"""

import posixpath

from msgspec.structs import replace

from pyshim.model.config import Config, HypervisorConfig
from pyshim.model.confinement import NO_LABELS, ProcessLabels
from pyshim.model.errors import InvalidArgument
from pyshim.model.ids import ContainerId, GuestPath, HostPath, SandboxId
from pyshim.model.places import SHARED_ROOT
from pyshim.model.plans import SharePlan
from pyshim.model.volumes import HostMount, Propagation, TargetKind, VirtiofsdPlan

SHARE_TAG = "kataShared"
GUEST_SHARED_DIR = GuestPath("/run/kata-containers/shared/containers")
BIND_MOUNTS_DIR = "sandbox-mounts"
WATCHABLE_DIR = "watchable"
"""The directory of the share over which kata-agent mounts a file system for the volumes it watches; the guest cannot
make it, since it has the share read-only.
"""
GUEST_SANDBOX_DIR = GuestPath("/run/kata-containers/sandbox")
GUEST_VOLUMES_DIR = GuestPath(f"{GUEST_SANDBOX_DIR}/volumes")


def guest_container_dir(container_id: ContainerId) -> str:
    """The guest's directory of a container: its root file system if it is not shared, and what is written to it."""
    return f"/run/kata-containers/{container_id}"


def share_plan(sandbox_id: SandboxId, config: Config, *, vm_dir: str, labels: ProcessLabels = NO_LABELS) -> SharePlan:
    """The share of one sandbox. With `shared_fs = "none"` it has the directories' names only."""
    hypervisor = config.hypervisor
    root = HostPath(f"{SHARED_ROOT}/{sandbox_id}")
    mounts_dir, exported_dir = HostPath(f"{root}/mounts"), HostPath(f"{root}/shared")
    share = SharePlan(
        root=root,
        mounts_dir=mounts_dir,
        exported_dir=exported_dir,
        mounts=(),
        bind_mounts=(),
        directories=(),
        virtiofsd=None,
    )
    if hypervisor.shared_fs == "none":
        return share
    mounts = HostMount(
        type="bind",
        source=mounts_dir,
        target=mounts_dir,
        target_kind=TargetKind.DIRECTORY,
        options=("bind", "nodev", "nosuid"),
        propagation=Propagation.SHARED,
        beneath=None,
    )
    exported = replace(
        mounts, target=exported_dir, options=("bind", "ro", "nodev", "nosuid"), propagation=Propagation.SLAVE
    )
    return replace(
        share,
        mounts=(mounts, exported),
        bind_mounts=_bind_mounts(config.runtime.sandbox_bind_mounts, mounts_dir),
        directories=(HostPath(f"{mounts_dir}/{WATCHABLE_DIR}"),),
        virtiofsd=VirtiofsdPlan(
            binary=HostPath(hypervisor.virtio_fs_daemon),
            shared_dir=exported_dir,
            listen_path=HostPath(f"{vm_dir}/vhost-fs.sock"),
            cache=hypervisor.virtio_fs_cache,
            extra_args=_extra_args(hypervisor),
            debug=hypervisor.enable_debug,
            dumps_core=hypervisor.enable_core_dumps,
            labels=labels,
        ),
    )


def _extra_args(hypervisor: HypervisorConfig) -> tuple[str, ...]:
    """Extended attributes are on, unless an extra argument decides it: a program's capabilities are one of them."""
    words = hypervisor.virtio_fs_extra_args
    if not hypervisor.virtio_fs_xattr or any("xattr" in word for word in words):
        return words
    return (*words, "--xattr")


def _bind_mounts(texts: tuple[str, ...], mounts_dir: HostPath) -> tuple[HostMount, ...]:
    """Raises InvalidArgument for a path that cannot be, or two that would have the same name in the guest."""
    mounts = {}
    for text in texts:
        mount = _bind_mount(text, mounts_dir)
        if mount.target in mounts:
            name = posixpath.basename(mount.target)
            raise InvalidArgument(f"read sandbox_bind_mounts: two of them are called {name!r}")
        mounts[mount.target] = mount
    return tuple(mounts.values())


def _bind_mount(text: str, mounts_dir: HostPath) -> HostMount:
    path, colon, mode = text.rpartition(":")
    if not colon or mode not in ("ro", "rw"):
        path, mode = text, "ro"
    path = posixpath.normpath(path)
    if not path.startswith("/") or path == "/" or "\0" in path:
        raise InvalidArgument(f"read sandbox_bind_mounts: {text!r} is not an absolute path below /")
    return HostMount(
        type="bind",
        source=path,
        target=HostPath(f"{mounts_dir}/{BIND_MOUNTS_DIR}/{posixpath.basename(path)}"),
        target_kind=TargetKind.LIKE_SOURCE,
        options=("rbind", "ro", "rslave") if mode == "ro" else ("rbind", "rslave"),
        propagation=None,
        beneath=mounts_dir,
    )
