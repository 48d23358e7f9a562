"""virtiofsd's mount namespace: the programs' files, the share, and mounts that the host does not see. Blocking.

A volume with file systems mounted below it is mounted here when it is to get none of the host's later mounts. In the
host's namespace such a copy would outlive an unmount by the host, whose directory then could not be removed (EBUSY). In
another namespace it cannot hold a directory: rmdir(2) detaches it. The namespace ends with the shim and virtiofsd.
"""

import errno
import logging
import os
import stat
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from pyshim.host import syscalls
from pyshim.host.fds import OwnedFd
from pyshim.host.mounts.mounting import bind_copy, explained, make_target
from pyshim.host.mounts.view import CODE, DEVICES, View, ViewPath, home_of, make_view
from pyshim.host.os_errors import describe_os_error
from pyshim.host.processes.identity import is_script
from pyshim.host.threads import in_short_thread
from pyshim.model.volumes import HostMount, VirtiofsdPlan

log = logging.getLogger(__name__)


class ShareNamespace:
    """Owns the namespace until `close`."""

    def __init__(self, view: View, exported_dir: str) -> None:
        self.view = view
        self._exported_dir = exported_dir
        self._places: dict[str, str] = {}
        """Mount points in the namespace, by the targets that the plan names."""

    def mount(self, mount: HostMount) -> None:
        """The bind is in place for virtiofsd alone; the host has its mount point. Raises ShimError naming it."""
        assert mount.beneath is not None
        place = f"{self._exported_dir}{mount.target.removeprefix(mount.beneath)}"

        try:
            make_target(mount)
            with bind_copy(mount) as copy:
                self._inside(lambda: _attach(copy, place))
        except OSError as error:
            raise explained(mount, error) from error
        self._places[mount.target] = place

    def unmount(self, target: str) -> None:
        """A mount that `mount` made is gone, for the guest as well. Idempotent; raises OSError."""
        place = self._places.get(target)
        if place is not None and self.view.is_open:
            self._inside(lambda: _unmount(place))
        self._places.pop(target, None)

    def show_only(self, pid: int) -> None:
        """/proc in the namespace has of processes this one's descriptors and threads, and nothing else. Raises OSError.

        virtiofsd keeps both open. From them a `..` leads no further than to the root of the namespace.
        """
        with ExitStack() as opened:
            copies = {f"self/{name}": opened.enter_context(_copy(f"/proc/{pid}/{name}")) for name in _OWN_PROC}
            copies |= {name: opened.enter_context(_copy(f"/proc/{name}")) for name in _KERNEL_PROC}

            def cover() -> None:
                # Made in a copy of the namespace, so that the starting program finds it whole.
                syscalls.unshare(syscalls.CLONE_NEWNS)
                syscalls.mount("none", "/", "", syscalls.MS_REC | syscalls.MS_PRIVATE)
                _make_proc(copies)
                with _copy("/proc") as whole:
                    self.view.enter()
                    _attach(whole, "/proc")

            self._inside(cover)

    def close(self) -> None:
        """Idempotent."""
        self.view.close()

    def _inside(self, work: Callable[[], None]) -> None:
        """`work` in a thread that enters the namespace and ends."""

        def run() -> None:
            self.view.enter()
            work()

        in_short_thread(run)


_OWN_PROC = ("fd", "task", "status")
_KERNEL_PROC = ("sys/fs/file-max",)
"""The files below /proc that the C virtiofsd reads."""


def _make_proc(copies: Mapping[str, OwnedFd]) -> None:
    """A read-only /proc of these files and directories, by their paths in it."""
    flags = syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC
    syscalls.mount("proc", "/proc", "tmpfs", flags, "mode=0555,size=64k")
    for name, copy in copies.items():
        path = f"/proc/{name}"
        if stat.S_ISDIR(os.fstat(copy.fileno()).st_mode):
            os.makedirs(path)
        else:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444))
        syscalls.mount_setattr(copy.fileno(), 0, attr_set=syscalls.MOUNT_ATTR_RDONLY)
        _attach(copy, path)
    with OwnedFd(os.open("/proc", os.O_PATH | os.O_CLOEXEC)) as proc:
        syscalls.mount_setattr(proc.fileno(), 0, attr_set=syscalls.MOUNT_ATTR_RDONLY)


def _copy(path: str) -> OwnedFd:
    flags = syscalls.OPEN_TREE_CLONE | syscalls.AT_RECURSIVE
    return OwnedFd(syscalls.open_tree(syscalls.AT_FDCWD, path, flags))


def _unmount(place: str) -> None:
    """With what is mounted below it. A place where nothing is mounted is left alone."""
    try:
        syscalls.umount2(place, syscalls.MNT_DETACH | syscalls.UMOUNT_NOFOLLOW)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOENT):
            raise


def _attach(copy: OwnedFd, path: str) -> None:
    with OwnedFd(os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)) as target:
        syscalls.move_mount(copy.fileno(), target.fileno())


def share_namespace(plan: VirtiofsdPlan) -> ShareNamespace | None:
    """The namespace for one virtiofsd, entered by the calling thread; None for a script or if the host refuses."""
    program = os.path.realpath(plan.binary)
    if is_script(program):
        log.info("virtiofsd sees the host's files", extra={"reason": f"{plan.binary!r} is a script"})
        return None
    kept = (
        *CODE,
        *DEVICES,
        ViewPath(path=home_of(program), why="virtiofsd's own libraries"),
        ViewPath(path=plan.binary, why="virtiofsd"),
        ViewPath(path=plan.shared_dir, why="the share", is_writable=True, is_shared=True),
    )
    try:
        # Both flavours ask /proc/sys at their start how many files may be open.
        return ShareNamespace(make_view(kept, os.path.dirname(plan.listen_path), shows_kernel=True), plan.shared_dir)
    except OSError as error:
        log.warning("virtiofsd sees the host's files", extra={"reason": describe_os_error(error)})
        return None
