"""Carries out `HostMount`s. Blocking; `LinuxHost` offers it to the loop.

Bind mounts are made with the file-descriptor mount calls: the copy gets its attributes (read-only first of all) before
it is attached. A bind followed by a remount leaves a moment in which a guest could write, and does not reach the copies
that propagation made of the mount. Needs Linux 5.12 (mount_setattr). Everything else goes through mount(2).
"""

import errno
import os

from pyshim.host import syscalls
from pyshim.host.fds import OwnedFd
from pyshim.host.mounts.loops import attach_loop
from pyshim.host.mounts.options import MountOptions, OverlayData, PropagationChange, overlay_data, parse_mount_options
from pyshim.host.mounts.targets import fd_path, make_target, open_target
from pyshim.host.threads import in_short_thread
from pyshim.model.errors import FailedPrecondition, InvalidArgument, ShimError, Unimplemented
from pyshim.model.volumes import HostMount

_PAGE_BYTES = os.sysconf("SC_PAGESIZE")
_COMPACT_ABOVE_BYTES = _PAGE_BYTES - 512
"""containerd's threshold; the rest is for the options the kernel adds."""


def perform_mount(mount: HostMount) -> None:
    """The mount is in place; its mount point was made when it was missing. On failure nothing is left mounted.

    Raises ShimError naming the target, and the source where that is at fault.
    """
    options = parse_mount_options(mount.options, mount.propagation, target=mount.target)
    if mount.type.startswith(("fuse.", "fuse3.")):
        raise Unimplemented(f"mount {mount.target!r}: type {mount.type!r} needs a FUSE helper, which is not supported")
    try:
        make_target(mount)
        if options.flags & syscalls.MS_REMOUNT:
            _remount(mount, options)
        elif options.is_bind or mount.type in ("bind", "rbind"):
            _bind(mount, options)
        else:
            _mount_new(mount, options)
    except OSError as error:
        raise explained(mount, error) from error


def explained(mount: HostMount, error: OSError) -> ShimError:
    """The error of a mount that failed, in words that name source and target."""
    cause = error.strerror or str(error)
    what = f"mount {mount.target!r} ({mount.type or 'none'} of {mount.source!r})"
    if error.errno == errno.EXDEV and mount.beneath is not None:
        return FailedPrecondition(f"{what}: the path leads out of {mount.beneath!r}")
    if error.errno == errno.ENOSYS:
        return FailedPrecondition(f"{what}: the kernel is older than 5.12")
    if error.errno == errno.ENODEV:
        return FailedPrecondition(f"{what}: the kernel has no file system {mount.type!r}")
    if error.errno == errno.ENOENT:
        return FailedPrecondition(f"{what}: {cause}" + (f" ({error.filename})" if error.filename else ""))
    if error.errno == errno.EINVAL:
        return InvalidArgument(f"{what}, options {','.join(mount.options)!r}: {cause}")
    return FailedPrecondition(f"{what}: {cause}")


def _bind(mount: HostMount, options: MountOptions) -> None:
    with _copy(mount, options) as copy:
        with open_target(mount) as target:
            syscalls.move_mount(copy.fileno(), target.fileno())
        _change_propagation(mount, copy, tuple(change for change in options.propagation if not change.recursive))


def bind_copy(mount: HostMount) -> OwnedFd:
    """The mount of a recursive bind, with its attributes, attached nowhere. Raises OSError, ShimError."""
    return _copy(mount, parse_mount_options(mount.options, mount.propagation, target=mount.target))


def _copy(mount: HostMount, options: MountOptions) -> OwnedFd:
    is_recursive = options.flags & syscalls.MS_REC or mount.type == "rbind"
    recursive = syscalls.AT_RECURSIVE if is_recursive else 0
    copy = OwnedFd(syscalls.open_tree(syscalls.AT_FDCWD, mount.source, syscalls.OPEN_TREE_CLONE | recursive))
    try:
        _set_attributes(copy.fileno(), options, recursive, in_share=mount.beneath is not None)
    except BaseException:
        copy.close()
        raise
    return copy


def _set_attributes(copy_fd: int, options: MountOptions, recursive: int, *, in_share: bool) -> None:
    atime = options.bind_atime
    if options.bind_attributes or atime is not None:
        # As mount(2) does it, only the topmost mount of a recursive bind is changed, except by `rro`.
        syscalls.mount_setattr(
            copy_fd,
            0,
            attr_set=options.bind_attributes | (atime or 0),
            attr_clr=syscalls.MOUNT_ATTR__ATIME if atime is not None else 0,
        )
    if in_share:
        # In a tree shared with a guest, device nodes are dead and set-user-id bits without effect on the host. The
        # guest sees the nodes and bits as they are: its own kernel opens and executes.
        walls = syscalls.MOUNT_ATTR_NODEV | syscalls.MOUNT_ATTR_NOSUID
        syscalls.mount_setattr(copy_fd, recursive, attr_set=walls)
    if options.read_only_recursive:
        syscalls.mount_setattr(copy_fd, syscalls.AT_RECURSIVE, attr_set=syscalls.MOUNT_ATTR_RDONLY)
    for change in options.propagation:
        if change.recursive:
            # Before it is attached: in a shared tree it becomes shared again, but in a peer group of its own. In its
            # source's peer group, it would take the source's own mounts along when it is unmounted.
            syscalls.mount_setattr(copy_fd, syscalls.AT_RECURSIVE, propagation=change.flag)


def _mount_new(mount: HostMount, options: MountOptions) -> None:
    source, loop = mount.source, None
    if options.loop:
        source, loop = attach_loop(mount.source, read_only=options.is_read_only)
    try:
        with open_target(mount) as target:
            if mount.type == "overlay":
                plan = overlay_data(options.data, limit_bytes=_COMPACT_ABOVE_BYTES)
            else:
                plan = OverlayData(directory=None, data=",".join(options.data))
            if len(plan.data.encode()) >= _PAGE_BYTES:
                raise InvalidArgument(
                    f"mount {mount.target!r}: options of {len(plan.data)} bytes exceed the kernel's {_PAGE_BYTES}"
                )
            _mount_in(plan.directory, source, fd_path(target), mount.type, options.flags, plan.data)
    finally:
        if loop is not None:
            loop.close()
    if options.propagation:
        # Opened again, which now finds the new mount.
        with open_target(mount) as mounted:
            _change_propagation(mount, mounted, options.propagation)


def _remount(mount: HostMount, options: MountOptions) -> None:
    with open_target(mount) as mounted:
        flags = options.flags
        if options.is_bind:
            flags |= _kept_flags(mounted)
        syscalls.mount(mount.source, fd_path(mounted), mount.type, flags, ",".join(options.data))
        _change_propagation(mount, mounted, options.propagation, keep=True)


def _kept_flags(mounted: OwnedFd) -> int:
    """Flags of the mount that a remount must repeat: the kernel refuses to drop one it holds as locked."""
    present = os.statvfs(fd_path(mounted)).f_flag
    pairs = (
        (os.ST_NOSUID, syscalls.MS_NOSUID),
        (os.ST_NODEV, syscalls.MS_NODEV),
        (os.ST_NOEXEC, syscalls.MS_NOEXEC),
        (os.ST_NOATIME, syscalls.MS_NOATIME),
        (os.ST_NODIRATIME, syscalls.MS_NODIRATIME),
        (os.ST_RELATIME, syscalls.MS_RELATIME),
    )
    return sum(flag for bit, flag in pairs if present & bit)


def _change_propagation(
    mount: HostMount, mounted: OwnedFd, changes: tuple[PropagationChange, ...], *, keep: bool = False
) -> None:
    """The mount has these propagation types; on failure it is gone again, unless it is to be kept."""
    try:
        for change in changes:
            syscalls.mount("", fd_path(mounted), "", change.flag | (syscalls.MS_REC if change.recursive else 0))
    except OSError:
        if not keep:
            # By the fd's path, whose link is followed: the fd has the root of our mount open.
            syscalls.umount2(fd_path(mounted), syscalls.MNT_DETACH)
        raise


def _mount_in(directory: str | None, source: str, target: str, fs_type: str, flags: int, data: str) -> None:
    """mount(2), relative paths in `data` being relative to `directory`.

    The working directory belongs to the whole process; a thread of its own leaves that (unshare CLONE_FS), changes
    only its own, and ends, so no other code runs with it.
    """
    if directory is None:
        syscalls.mount(source, target, fs_type, flags, data)
        return

    def mount_there() -> None:
        syscalls.unshare(syscalls.CLONE_FS)
        os.chdir(directory)
        syscalls.mount(source, target, fs_type, flags, data)

    in_short_thread(mount_there)
