"""From the kernel to the agent in system calls: /init mounts the root image and becomes the agent, /shell a shell."""

from collections.abc import Iterable

from guest.image.recipe import STATIC_NODES
from guest.image.resume import Resumption, go_on
from guest.image.sysinit import SAVED_FD, Program
from guest.snapshot import subject

_READ_WRITE = 2
_CLOSE_ON_EXEC = 0o2000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_MOVE = 1, 2, 4, 8, 8192
_S_IFCHR = 0o020000
_TIOCSCTTY = 0x540E
_FIONCLEX = 0x5450
_BLKRASET = 0x1262
# 4 MiB: the interpreter and its libraries come in tens of requests, not in hundreds
_READ_AHEAD_SECTORS = 8192
_LOWEST_PRIORITY = 19

ROOT_DEVICE = b"/dev/vda"
NEW_ROOT = b"/root"

# argv and environment of the agent; docs/GUEST.md promises both.
AGENT_ARGV = tuple(word.encode() for word in subject.AGENT_ARGV)
TRACER_ARGV = (*AGENT_ARGV, b"tracer")
SHELL_ARGV = (b"/bin/sh", b"-l")
ENVIRONMENT = (b"PATH=/usr/sbin:/usr/bin:/sbin:/bin", b"HOME=/root", b"TERM=linux", b"LC_ALL=C.UTF-8")

# target, type, flags, options: what is mounted below the new root before the agent starts
_MOUNTS = (
    (b"/proc", b"proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, b""),
    (b"/sys", b"sysfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, b""),
    (b"/sys/fs/cgroup", b"cgroup2", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, b"nsdelegate"),
    (b"/dev/pts", b"devpts", _MS_NOSUID | _MS_NOEXEC, b"gid=0,mode=620,ptmxmode=666"),
    (b"/dev/shm", b"tmpfs", _MS_NOSUID | _MS_NODEV, b"mode=1777"),
    (b"/run", b"tmpfs", _MS_NOSUID | _MS_NODEV, b"mode=755"),
    (b"/tmp", b"tmpfs", _MS_NOSUID | _MS_NODEV, b"mode=1777"),
    (b"/var", b"tmpfs", _MS_NOSUID | _MS_NODEV, b"mode=755"),
)


def mount_devices(program: Program) -> None:
    """Append: /dev is there, for the console and for failure reports. Must come first."""
    program.call("mount", b"dev", b"/dev", b"devtmpfs", _MS_NOSUID, b"mode=755")


def load_modules(program: Program, paths: Iterable[str]) -> None:
    """Append: the modules at `paths` are loaded, as far as they can be. A missing driver shows in what needs it."""
    for path in paths:
        program.call("open", path.encode(), _CLOSE_ON_EXEC, keep=True)
        program.call("finit_module", SAVED_FD, b"", 0)
        program.call("close", SAVED_FD)


def enter_root(program: Program) -> None:
    """Append: what is mounted at `NEW_ROOT` is the root, with /dev moved along; the initrd is out of reach."""
    program.call("mount", b"/dev", NEW_ROOT + b"/dev", b"", _MS_MOVE, 0, must="move /dev to the root image")
    program.call("chdir", NEW_ROOT, must="enter root image")
    program.call("mount", b".", b"/", b"", _MS_MOVE, 0, must="make root image the root")
    program.call("chroot", b".", must="make root image the root")


def mount_file_systems(program: Program) -> None:
    """Append: everything docs/GUEST.md promises the agent to be mounted is mounted, the device nodes are made."""
    for directory in (b"/dev/pts", b"/dev/shm", b"/dev/net"):
        program.call("mkdir", directory, 0o755)
    program.call("symlink", b"/proc/self/fd", b"/dev/fd")
    for node, major, minor in STATIC_NODES:
        program.call("mknod", node.encode(), _S_IFCHR | 0o660, major << 8 | minor)
    for target, kind, flags, options in _MOUNTS:
        program.call("mount", kind, target, kind, flags, options, must=f"mount {target.decode()}")
    for directory in (b"/var/lib", b"/var/log"):
        program.call("mkdir", directory, 0o755)


def take_console(program: Program, console: bytes = b"/dev/console") -> None:
    """Append: the console is the controlling terminal and the standard streams."""
    program.call("setsid")
    # without a console device the agent runs with no standard streams rather than not at all
    program.call("open", console, _READ_WRITE | _CLOSE_ON_EXEC, keep=True)
    for descriptor in range(3):
        program.call("dup2", SAVED_FD, descriptor)
    # Where the kernel had opened nothing, 0 is the opened one itself and no copy: it would be closed at an exec.
    program.call("ioctl", 0, _FIONCLEX, 0)
    program.call("ioctl", 0, _TIOCSCTTY, 0)


def become(program: Program, argv: tuple[bytes, ...]) -> None:
    """Append: process 1 is `argv`, at the console."""
    take_console(program)
    program.call("execve", argv[0], argv, ENVIRONMENT, must=f"start {argv[0].decode()}")


def init_program(
    *,
    loader_modules: Iterable[str],
    background_modules: Iterable[str],
    argv: tuple[bytes, ...],
    resumption: Resumption | None = None,
) -> bytes:
    """The ELF file of the first process; module paths are the initrd's and the root image's own, in loading order.

    It ends in `argv` as process 1, or goes on as the process of `resumption`. Only a lost root image, an unstartable
    `argv` or missing memory of `resumption` stop it.
    """
    program = Program()
    mount_devices(program)
    load_modules(program, loader_modules)
    flags = _MS_RDONLY | _MS_NODEV
    program.call("open", ROOT_DEVICE, _CLOSE_ON_EXEC, keep=True)
    program.call("ioctl", SAVED_FD, _BLKRASET, _READ_AHEAD_SECTORS)
    program.call("close", SAVED_FD)
    program.call("mount", ROOT_DEVICE, NEW_ROOT, b"erofs", flags, 0, must="mount root image /dev/vda as erofs")
    enter_root(program)
    mount_file_systems(program)
    background = Program()
    background.call("setpriority", 0, 0, _LOWEST_PRIORITY)
    load_modules(background, background_modules)
    program.in_child(background)
    if resumption is None:
        become(program, argv)
    else:
        take_console(program)
        go_on(program, resumption)
    return program.image()
