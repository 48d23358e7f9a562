"""The directory tree a sandbox shares with its guest, and the virtiofsd that serves it.

Host: /run/kata-containers/shared/sandboxes/<sid>/{mounts,shared}: `mounts` is the source of truth, `shared` the
read-only slave bind of it that virtiofsd exports. Guest: tag `kataShared` on GUEST_SHARED_DIR. The layout and the names
are Kata's (its operators look there).
"""

import posixpath

from pyshim.model.errors import InvalidArgument
from pyshim.model.ids import ContainerId, GuestPath, HostPath, SandboxId
from pyshim.model.labels import NO_LABELS, ProcessLabels
from pyshim.model.mounts import HostMount, Propagation, TargetKind
from pyshim.model.plans import SharePlan
from pyshim.model.volumes import VirtiofsdPlan

SHARE_TAG = "kataShared"
HOST_SHARED_ROOT = "/run/kata-containers/shared/sandboxes"
GUEST_SHARED_DIR = GuestPath("/run/kata-containers/shared/containers")
BIND_MOUNTS_DIR = "sandbox-mounts"
WATCHABLE_DIR = "watchable"
"""The directory of the share over which kata-agent mounts a file system for the volumes it watches; the guest cannot
make it, since it has the share read-only.
"""
GUEST_SANDBOX_DIR = GuestPath("/run/kata-containers/sandbox")


def guest_container_dir(container_id: ContainerId) -> str:
    """The guest's directory of a container: its root file system if it is not shared, and what is written to it."""
    return f"/run/kata-containers/{container_id}"


def no_share(sandbox_id: SandboxId) -> SharePlan:
    """The directories' names without anything in them: `shared_fs = "none"`."""
    root = f"{HOST_SHARED_ROOT}/{sandbox_id}"
    return SharePlan(
        root=HostPath(root),
        mounts_dir=HostPath(f"{root}/mounts"),
        exported_dir=HostPath(f"{root}/shared"),
        mounts=(),
        bind_mounts=(),
        directories=(),
        virtiofsd=None,
    )


def share_plan(
    *,
    sandbox_id: SandboxId,
    vm_dir: str,
    binary: str,
    cache: str,
    extra_args: tuple[str, ...],
    debug: bool,
    dumps_core: bool = False,
    labels: ProcessLabels = NO_LABELS,
    bind_mounts: tuple[str, ...] = (),
) -> SharePlan:
    """The share of one sandbox; pure."""
    root = HostPath(f"{HOST_SHARED_ROOT}/{sandbox_id}")
    mounts_dir = HostPath(f"{root}/mounts")
    exported_dir = HostPath(f"{root}/shared")
    return SharePlan(
        root=root,
        mounts_dir=mounts_dir,
        exported_dir=exported_dir,
        mounts=(
            HostMount(
                type="bind",
                source=mounts_dir,
                target=mounts_dir,
                target_kind=TargetKind.DIRECTORY,
                options=("bind", "nodev", "nosuid"),
                propagation=Propagation.SHARED,
                beneath=None,
            ),
            HostMount(
                type="bind",
                source=mounts_dir,
                target=exported_dir,
                target_kind=TargetKind.DIRECTORY,
                options=("bind", "ro", "nodev", "nosuid"),
                propagation=Propagation.SLAVE,
                beneath=None,
            ),
        ),
        bind_mounts=tuple(_bind_mount(text, mounts_dir) for text in _distinct(bind_mounts)),
        directories=(HostPath(f"{mounts_dir}/{WATCHABLE_DIR}"),),
        virtiofsd=VirtiofsdPlan(
            binary=HostPath(binary),
            shared_dir=exported_dir,
            listen_path=HostPath(f"{vm_dir}/vhost-fs.sock"),
            cache=cache,
            extra_args=extra_args,
            debug=debug,
            dumps_core=dumps_core,
            labels=labels,
        ),
    )


def _distinct(texts: tuple[str, ...]) -> tuple[str, ...]:
    """Raises InvalidArgument when two of them would have the same name in the guest."""
    names = [_path_and_mode(text)[0].rpartition("/")[2] for text in texts]
    for name in names:
        if names.count(name) > 1:
            raise InvalidArgument(f"read sandbox_bind_mounts: two of them are called {name!r}")
    return texts


def _path_and_mode(text: str) -> tuple[str, str]:
    path, colon, mode = text.rpartition(":")
    path, mode = (path, mode) if colon and mode in ("ro", "rw") else (text, "ro")
    path = posixpath.normpath(path)
    if not path.startswith("/") or path == "/" or "\0" in path:
        raise InvalidArgument(f"read sandbox_bind_mounts: {text!r} is not an absolute path below /")
    return path, mode


def _bind_mount(text: str, mounts_dir: HostPath) -> HostMount:
    path, mode = _path_and_mode(text)
    return HostMount(
        type="bind",
        source=path,
        target=HostPath(f"{mounts_dir}/{BIND_MOUNTS_DIR}/{posixpath.basename(path)}"),
        target_kind=TargetKind.LIKE_SOURCE,
        options=("rbind", *(("ro",) if mode == "ro" else ()), "rslave"),
        propagation=None,
        beneath=mounts_dir,
    )
