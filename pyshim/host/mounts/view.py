"""A mount namespace in which a program sees a few of the host's files and nothing else.

It is a copy of the host's namespace with the other files removed. It lives as long as the programs in it and leaves
nothing behind. Mounts that the host makes and removes below a directory of the view come and go in it, too (slaves,
mount_namespaces(7)). It has none of the host's other mounts, so it keeps none busy.
"""

import errno
import os
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Self

import msgspec

from pyshim.host import syscalls
from pyshim.host.fds import OwnedFd

_PROGRAMS = ("bin", "sbin", "libexec")
"""Directories beside which a program's libraries and data are."""


class ViewPath(msgspec.Struct, frozen=True, kw_only=True):
    """A file or directory of the host that stays where it is; a link at its path stays, with its target."""

    path: str
    why: str
    is_writable: bool = False
    """As far as its modes and the program's user go."""
    is_recursive: bool = True
    """Of a directory: with the mounts below it."""
    is_shared: bool = False
    """Mounts made on it in the view reach the namespaces that are copied from the view (mount_namespaces(7))."""
    may_lack: bool = False
    """The host may lack it."""


_CODE_PATHS = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/nix/store",
    "/gnu/store",
    "/etc/ld.so.cache",
    "/etc/ld.so.preload",
    "/etc/alternatives",
)
_DEVICE_PATHS = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
CODE = tuple(ViewPath(path=path, why="programs and libraries", may_lack=True) for path in _CODE_PATHS)
"""Directories of programs, libraries and firmware in distributions, and files of the dynamic loader."""
DEVICES = tuple(ViewPath(path=path, why="any program may use it", may_lack=True) for path in _DEVICE_PATHS)


class _ViewCopy(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    copy: OwnedFd
    is_directory: bool
    is_shared: bool


def home_of(program: str) -> str:
    """The directory that the program was installed into; the program alone if that is the root directory."""
    home = os.path.dirname(program)
    if os.path.basename(home) in _PROGRAMS:
        home = os.path.dirname(home)
    return home if home != "/" else program


class View:
    """Such a namespace, which dies with this object and the last program in it."""

    def __init__(self, namespace: OwnedFd, root: OwnedFd) -> None:
        self._namespace = namespace
        self._root = root

    @property
    def is_open(self) -> bool:
        return self._namespace.is_open

    def enter(self) -> None:
        """The calling thread, and the programs it executes, see the view's files only, for good.

        setns(2) leads to the root of the namespace, whatever root its maker had. Raises OSError when that is not the
        root of the view: the program would see other files.
        """
        syscalls.unshare(syscalls.CLONE_FS)
        syscalls.setns(self._namespace.fileno(), syscalls.CLONE_NEWNS)
        os.fchdir(self._root.fileno())
        if not os.path.samestat(os.stat("/"), os.fstat(self._root.fileno())):
            raise OSError(errno.EXDEV, "the namespace has another root than the view")

    def close(self) -> None:
        """Idempotent."""
        self._namespace.close()
        self._root.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def make_view(kept: Iterable[ViewPath], mount_point: str, *, shows_kernel: bool = False) -> View:
    """The view of `kept`. The calling thread stays in it, so it must be one that ends.

    `mount_point` is any directory of the host, which does not change. The view has a read-only /proc in which users see
    their own processes only; with `shows_kernel` also the kernel's files, /proc/sys among them. Raises OSError with the
    path that is missing, or whose link leads out of the view.
    """
    kept = tuple(kept)
    syscalls.unshare(syscalls.CLONE_NEWNS)
    namespace = OwnedFd(os.open("/proc/thread-self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC))
    try:
        with ExitStack() as opened:
            # The paths are those of the thread's root. It may be a chroot; what is replaced is the namespace's root.
            own_root = opened.enter_context(OwnedFd(os.open("/", os.O_PATH | os.O_CLOEXEC)))
            syscalls.setns(namespace.fileno(), syscalls.CLONE_NEWNS)
            syscalls.mount("none", "/", "", syscalls.MS_REC | syscalls.MS_SLAVE)
            os.fchdir(own_root.fileno())
            os.chroot(".")
            places, links = _found(kept, opened)
            above = opened.enter_context(OwnedFd(os.open(os.path.dirname(mount_point), os.O_PATH | os.O_CLOEXEC)))
            syscalls.setns(namespace.fileno(), syscalls.CLONE_NEWNS)
            os.fchdir(above.fileno())
            _fill(os.path.basename(mount_point), places, links, shows_kernel=shows_kernel)
        # "." twice: the old root is put over the new one, and taken away. Source: pivot_root(2), Notes.
        syscalls.pivot_root(".", ".")
        syscalls.umount2(".", syscalls.MNT_DETACH)
        os.chdir("/")
        for each in kept:
            if not each.may_lack and not os.path.exists(each.path):
                raise FileNotFoundError(errno.ENOENT, "a link leads out of the view", each.path)
        return View(namespace, OwnedFd(os.open("/", os.O_PATH | os.O_CLOEXEC)))
    except BaseException:
        namespace.close()
        raise


def _fill(name: str, places: list[_ViewCopy], links: list[tuple[str, str]], *, shows_kernel: bool) -> None:
    """The view is mounted on `name` of the working directory, which is then its root."""
    flags = syscalls.MS_NOSUID | syscalls.MS_NODEV
    syscalls.mount("view", name, "tmpfs", flags, "mode=0755,size=1m")
    os.chdir(name)
    for place in places:
        _put(place)
    for path, target in links:
        os.makedirs(os.path.dirname(f".{path}"), exist_ok=True)
        os.symlink(target, f".{path}")
    _put_proc(shows_kernel=shows_kernel)
    with OwnedFd(os.open(".", os.O_PATH | os.O_CLOEXEC)) as root:
        syscalls.mount_setattr(root.fileno(), 0, attr_set=syscalls.MOUNT_ATTR_RDONLY)


def _found(kept: Iterable[ViewPath], copies: ExitStack) -> tuple[list[_ViewCopy], list[tuple[str, str]]]:
    """Copies of the view's paths, parents first, and the links to them."""
    places: list[_ViewCopy] = []
    links: list[tuple[str, str]] = []
    roots: set[str] = set()
    done: set[str] = set()
    for each in kept:
        real = os.path.realpath(each.path)
        if not os.path.lexists(real) and each.may_lack:
            continue
        if not _is_below(real, roots) and real not in done:
            copy = copies.enter_context(_copy(each, real))
            places.append(_ViewCopy(path=real, copy=copy, is_directory=os.path.isdir(real), is_shared=each.is_shared))
            done.add(real)
            if each.is_recursive and os.path.isdir(real):
                roots.add(real)
        if real != each.path and not _is_below(each.path, roots) and each.path not in done:
            links.append((each.path, real))
            done.add(each.path)
            roots.add(each.path)
    return places, links


def _is_below(path: str, roots: set[str]) -> bool:
    while path not in roots and path != "/":
        path = os.path.dirname(path)
    return path in roots


def _copy(kept: ViewPath, real: str) -> OwnedFd:
    recursive = syscalls.AT_RECURSIVE if kept.is_recursive else 0
    copy = OwnedFd(syscalls.open_tree(syscalls.AT_FDCWD, real, syscalls.OPEN_TREE_CLONE | recursive))
    attributes = syscalls.MOUNT_ATTR_NOSUID | (0 if kept.is_writable else syscalls.MOUNT_ATTR_RDONLY)
    try:
        syscalls.mount_setattr(copy.fileno(), recursive, attr_set=attributes)
    except BaseException:
        copy.close()
        raise
    return copy


def _put(place: _ViewCopy) -> None:
    target = f".{place.path}"
    if not os.path.lexists(target):
        os.makedirs(target if place.is_directory else os.path.dirname(target), exist_ok=True)
        if not place.is_directory:
            os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444))
    with OwnedFd(os.open(target, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)) as opened:
        syscalls.move_mount(place.copy.fileno(), opened.fileno())
    if place.is_shared:
        syscalls.mount_setattr(place.copy.fileno(), syscalls.AT_RECURSIVE, propagation=syscalls.MS_SHARED)


def _put_proc(*, shows_kernel: bool) -> None:
    """Not the host's: this one hides other users' processes, and nothing can be written in it.

    Source: proc(5), hidepid and subset; per mount since Linux 5.8.
    """
    os.makedirs("./proc", exist_ok=True)
    flags = syscalls.MS_RDONLY | syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC
    syscalls.mount("proc", "./proc", "proc", flags, "hidepid=2" if shows_kernel else "hidepid=2,subset=pid")
