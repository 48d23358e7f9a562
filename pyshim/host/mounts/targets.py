"""Mount points: made when missing and opened, beneath a root where a guest could have planted links."""

import errno
import os
import stat

from pyshim.host import syscalls
from pyshim.host.fds import OwnedFd
from pyshim.model.errors import FailedPrecondition
from pyshim.model.volumes import HostMount, TargetKind

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
