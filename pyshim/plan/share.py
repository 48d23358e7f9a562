"""The directory tree a sandbox shares with its guest, and the virtiofsd that serves it.

Host: /run/kata-containers/shared/sandboxes/<sid>/{mounts,shared}: `mounts` is the source of truth, `shared` the
read-only slave bind of it that virtiofsd exports. Guest: tag `kataShared` on GUEST_SHARED_DIR. The layout and the names
are Kata's (its operators look there).
"""

from dataclasses import dataclass

from pyshim.model.ids import GuestPath, HostPath, SandboxId
from pyshim.model.mounts import HostMount, Propagation, TargetKind
from pyshim.model.share import VirtiofsdPlan

SHARE_TAG = "kataShared"
HOST_SHARED_ROOT = "/run/kata-containers/shared/sandboxes"
GUEST_SHARED_DIR = GuestPath("/run/kata-containers/shared/containers")
GUEST_SANDBOX_DIR = GuestPath("/run/kata-containers/sandbox")


@dataclass(frozen=True, slots=True, kw_only=True)
class SharePlan:
    root: HostPath
    mounts_dir: HostPath
    exported_dir: HostPath
    mounts: tuple[HostMount, ...]
    """To be made in order: `mounts` bound on itself and shared, then its read-only slave."""
    virtiofsd: VirtiofsdPlan | None
    """None where guest and host share no files: then `mounts` is empty, and volumes are copied."""


def no_share(sandbox_id: SandboxId) -> SharePlan:
    """The directories' names without anything in them: `shared_fs = "none"`."""
    root = f"{HOST_SHARED_ROOT}/{sandbox_id}"
    return SharePlan(
        root=HostPath(root),
        mounts_dir=HostPath(f"{root}/mounts"),
        exported_dir=HostPath(f"{root}/shared"),
        mounts=(),
        virtiofsd=None,
    )


def share_plan(
    *, sandbox_id: SandboxId, vm_dir: str, binary: str, cache: str, extra_args: tuple[str, ...], debug: bool
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
                options=("bind",),
                propagation=Propagation.SHARED,
                beneath=None,
            ),
            HostMount(
                type="bind",
                source=mounts_dir,
                target=exported_dir,
                target_kind=TargetKind.DIRECTORY,
                options=("bind", "ro"),
                propagation=Propagation.SLAVE,
                beneath=None,
            ),
        ),
        virtiofsd=VirtiofsdPlan(
            binary=HostPath(binary),
            shared_dir=exported_dir,
            listen_path=HostPath(f"{vm_dir}/vhost-fs.sock"),
            cache=cache,
            extra_args=extra_args,
            debug=debug,
        ),
    )
