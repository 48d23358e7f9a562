"""Carries out `HostMount`s. Blocking; `LinuxHost` offers it to the loop.

Bind mounts are made with the file-descriptor mount calls: the copy gets its attributes (read-only first of all) before
it is attached. A bind followed by a remount leaves a moment in which a guest could write, and does not reach the copies
that propagation made of the mount. Needs Linux 5.12 (mount_setattr). Everything else goes through mount(2).

Mount points are made and opened beneath a root where a guest could have planted links. A file's loop device vanishes
with its mount (loop(4), linux/loop.h).
"""

import errno
import fcntl
import os
import stat
import struct

from pyshim.host import syscalls
from pyshim.host.fds import OwnedFd
from pyshim.host.mounts.options import MountOptions, OverlayData, PropagationChange, overlay_data, parse_mount_options
from pyshim.host.threads import in_short_thread
from pyshim.model.errors import FailedPrecondition, InvalidArgument, ShimError, Unimplemented
from pyshim.model.volumes import HostMount, TargetKind

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


_BENEATH = syscalls.RESOLVE_BENEATH | syscalls.RESOLVE_NO_MAGICLINKS


def wanted_kind(mount: HostMount) -> TargetKind:
    """The kind of mount point, DIRECTORY or FILE. Raises OSError when LIKE_SOURCE cannot look at the source."""
    if mount.target_kind is not TargetKind.LIKE_SOURCE:
        return mount.target_kind
    return TargetKind.DIRECTORY if stat.S_ISDIR(os.stat(mount.source).st_mode) else TargetKind.FILE


def make_target(mount: HostMount) -> None:
    """The mount point exists, with the directories above it (mode 0755, files 0644). Raises OSError, ShimError."""
    kind = wanted_kind(mount)
    if mount.beneath is None:
        _make_plain(mount.target, kind)
        return
    with OwnedFd(os.open(mount.beneath, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as root:
        _make_beneath(root.fileno(), _relative(mount), kind)


def open_target(mount: HostMount) -> OwnedFd:
    """The file visible at the target now, opened with O_PATH; with `beneath`, the walk cannot have left that root.

    Raises OSError: EXDEV when a link or `..` leads out of the root.
    """
    if mount.beneath is None:
        return OwnedFd(os.open(mount.target, os.O_PATH | os.O_CLOEXEC))
    with OwnedFd(os.open(mount.beneath, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as root:
        return OwnedFd(syscalls.openat2(root.fileno(), _relative(mount), os.O_PATH, resolve=_BENEATH))


def fd_path(fd: OwnedFd) -> str:
    """A path of the file that `fd` has open, for system calls that take no fd."""
    return f"/proc/self/fd/{fd.fileno()}"


def _relative(mount: HostMount) -> str:
    assert mount.beneath is not None
    root = mount.beneath.rstrip("/")
    if mount.target.rstrip("/") == root:
        return "."
    if not mount.target.startswith(root + "/"):
        raise FailedPrecondition(f"mount {mount.target!r}: not below {mount.beneath!r}")
    return mount.target[len(root) + 1 :].lstrip("/")


def _make_plain(target: str, kind: TargetKind) -> None:
    if kind is TargetKind.DIRECTORY:
        os.makedirs(target, mode=0o755, exist_ok=True)
        return
    os.makedirs(os.path.dirname(target) or "/", mode=0o755, exist_ok=True)
    if not os.path.lexists(target):
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))


def _make_beneath(root_fd: int, path: str, kind: TargetKind) -> None:
    """Every missing component of `path` made, each opened beneath the root before the next one is looked at."""
    names = [name for name in path.split("/") if name not in ("", ".")]
    above = OwnedFd(os.dup(root_fd))
    try:
        for depth in range(1, len(names) + 1):
            is_last = depth == len(names)
            made = OwnedFd(_open_or_make(root_fd, above.fileno(), names[:depth], is_last and kind is TargetKind.FILE))
            above.close()
            above = made
    finally:
        above.close()


def _open_or_make(root_fd: int, above_fd: int, names: list[str], as_file: bool) -> int:
    path, name = "/".join(names), names[-1]
    flags = os.O_PATH if as_file else os.O_PATH | os.O_DIRECTORY
    try:
        return syscalls.openat2(root_fd, path, flags, resolve=_BENEATH)
    except FileNotFoundError:
        pass
    if name == "..":
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), path)
    # A dangling link makes both of these fail with EEXIST: neither follows the last component.
    if as_file:
        os.close(
            os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644, dir_fd=above_fd)
        )
    else:
        os.mkdir(name, 0o755, dir_fd=above_fd)
    return syscalls.openat2(root_fd, path, flags, resolve=_BENEATH)


_LOOP_CONFIGURE = 0x4C0A
_LOOP_CTL_GET_FREE = 0x4C82
_LO_FLAGS_READ_ONLY = 1
_LO_FLAGS_AUTOCLEAR = 4
_LOOP_ATTEMPTS = 32
"""Attempts to get a free loop device, which other processes take at the same time."""

# struct loop_config: fd, block_size, struct loop_info64 {5 u64, 4 u32, 64 + 64 + 32 bytes, 2 u64}, 8 reserved u64.
_LOOP_CONFIG = struct.Struct("=II5Q4I64s64s32s2Q64x")


def attach_loop(path: str, *, read_only: bool) -> tuple[str, OwnedFd]:
    """A loop device's path showing the file `path`, and the fd that keeps it until it is mounted.

    The device clears itself when its last user (the fd, then the mount) is gone. Raises OSError.
    """
    backing_flags = os.O_RDONLY if read_only else os.O_RDWR
    with (
        OwnedFd(os.open(path, backing_flags | os.O_CLOEXEC)) as backing,
        OwnedFd(os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)) as control,
    ):
        flags = _LO_FLAGS_AUTOCLEAR | (_LO_FLAGS_READ_ONLY if read_only else 0)
        name = os.fsencode(path)[:63]
        config = _LOOP_CONFIG.pack(backing.fileno(), 0, 0, 0, 0, 0, 0, 0, 0, 0, flags, name, b"", b"", 0, 0)
        for _ in range(_LOOP_ATTEMPTS):
            device = f"/dev/loop{fcntl.ioctl(control.fileno(), _LOOP_CTL_GET_FREE)}"
            loop = OwnedFd(os.open(device, backing_flags | os.O_CLOEXEC))
            try:
                fcntl.ioctl(loop.fileno(), _LOOP_CONFIGURE, config)
            except OSError as error:
                loop.close()
                if error.errno != errno.EBUSY:
                    raise
                # Another process took the free one first; ask for another.
                continue
            return device, loop
    raise OSError(errno.EBUSY, f"no free loop device in {_LOOP_ATTEMPTS} attempts", path)
