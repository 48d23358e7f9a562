"""Confines the shim and its children: capabilities and system calls that they give up for good.

The shim is a process of root that decodes a guest's bytes. Its capabilities and system calls are those that it or a
program it starts needs: QEMU, virtiofsd, OCI hooks with what they call (iptables, CNI plugins), log programs. So the
filter names what it denies, and mounts, namespaces and networks stay.
"""

import ctypes
import errno
import os
from functools import cache

from pyshim.host import syscalls
from pyshim.model.architecture import ARCHITECTURES

KEPT_CAPABILITIES = {
    "chown": 0,
    "dac_override": 1,
    "dac_read_search": 2,  # virtiofsd with --inode-file-handles
    "fowner": 3,
    "fsetid": 4,
    "kill": 5,
    "setgid": 6,
    "setuid": 7,
    "setpcap": 8,  # to take more away from children
    "net_bind_service": 10,  # hooks that reserve ports of the host
    "net_admin": 12,
    "net_raw": 13,  # iptables
    "ipc_lock": 14,  # a QEMU of root
    "sys_chroot": 18,  # to enter a mount namespace
    "sys_admin": 21,  # mounts, namespaces, device programs
    "sys_nice": 23,  # to pin the threads of QEMU's user
    "sys_resource": 24,
    "mknod": 27,  # hooks, and virtiofsd with --modcaps=+mknod
    "setfcap": 31,
}
"""Source of the numbers: linux/capability.h. Without `sys_ptrace` the memory and files of other pods' QEMU and of the
host's programs are out of reach by /proc. `identity.as_user_of` reads what is needed of the pod's QEMU."""
DENIED_CALLS = (
    *("kexec_load", "kexec_file_load", "reboot"),
    *("init_module", "finit_module", "delete_module"),
    *("add_key", "request_key", "keyctl"),
    *("ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd", "kcmp"),
    *("userfaultfd", "perf_event_open", "lookup_dcookie"),
    *("clock_settime", "clock_adjtime", "settimeofday", "adjtimex", "stime"),
    *("swapon", "swapoff", "acct", "quotactl", "quotactl_fd", "fanotify_init"),
    *("iopl", "ioperm", "modify_ldt", "vm86", "vm86old"),
    *("syslog", "vhangup", "nfsservctl", "uselib", "_sysctl"),
)
"""They return EPERM, also under their numbers in the tables of 32-bit programs and of x32."""
START_CALLS = ("io_uring_setup", "io_uring_enter", "io_uring_register")
"""Denied once the VM runs. Children inherit a filter, and QEMU uses these for its disks."""
DEVICE_LIST_CALL = "bpf"
"""Denied with them, where no device list of cgroup v2 will be changed."""

_SYS_PTRACE = 19
_LIBRARY = "libseccomp.so.2"
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_BAD_ARCHITECTURE, _OPTIMIZE = 2, 8
_BINARY_TREE = 2
_UNKNOWN_CALL = -1
"""Source: seccomp.h of libseccomp 2.5."""


def give_up_capabilities() -> None:
    """This thread, those it starts and all programs they execute have KEPT_CAPABILITIES at most. Raises OSError.

    Where /proc hides processes (`hidepid`), CAP_SYS_PTRACE is kept: nothing of QEMU's user would be seen without it.
    """
    kept = {*KEPT_CAPABILITIES.values(), *((_SYS_PTRACE,) if hides_processes() else ())}
    syscalls.limit_capabilities_of_programs(kept)
    syscalls.limit_capabilities_of_thread(kept)


def hides_processes(mounts: str = "/proc/self/mounts") -> bool:
    """/proc is mounted with `hidepid` (proc(5))."""
    with open(mounts, encoding="utf-8", errors="replace") as file:
        rows = [line.split() for line in file]
    options = [option for row in rows if row[1] == "/proc" and row[2] == "proc" for option in row[3].split(",")]
    return any(each.startswith("hidepid=") and each not in ("hidepid=0", "hidepid=off") for each in options)


def has_filter() -> bool:
    """`deny_calls` finds its library."""
    try:
        ctypes.CDLL(_LIBRARY)
    except OSError:
        return False
    return True


def deny_calls(names: tuple[str, ...] = DENIED_CALLS) -> bool:
    """All threads of this process and their children get EPERM for these calls too; False if libseccomp is missing.

    They gain no rights by an exec from now on either. Raises OSError.
    """
    if not has_filter():
        return False
    syscalls.filter_calls(filter_program(names))
    return True


@cache
def filter_program(names: tuple[str, ...] = DENIED_CALLS) -> bytes:
    """The filter as the kernel takes it. Raises OSError, also where libseccomp is missing.

    libseccomp takes 1 MiB and more of memory to make it, so the zygote does that once for all its forks.
    """
    library = ctypes.CDLL(_LIBRARY)
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_ALLOW)))
    try:
        _fill(library, context, names)
        with open(os.memfd_create("filter", os.MFD_CLOEXEC), "rb") as file:
            _checked(library.seccomp_export_bpf(context, file.fileno()), "write")
            file.seek(0)
            return file.read()
    finally:
        library.seccomp_release(context)


def _fill(library: ctypes.CDLL, context: ctypes.c_void_p, names: tuple[str, ...]) -> None:
    denied = ctypes.c_uint32(_ERRNO | errno.EPERM)
    _checked(library.seccomp_attr_set(context, _BAD_ARCHITECTURE, denied), "set up")
    library.seccomp_attr_set(context, _OPTIMIZE, ctypes.c_uint32(_BINARY_TREE))  # from 2.5 on; a matter of speed only
    library.seccomp_arch_native.restype = ctypes.c_uint32
    native = library.seccomp_arch_native()
    families = (each.seccomp_family for each in ARCHITECTURES.values())
    for other in next((family[1:] for family in families if family[0] == native), ()):
        _checked(library.seccomp_arch_add(context, ctypes.c_uint32(other)), "set up")
    for name in names:
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number != _UNKNOWN_CALL:  # of a later kernel than this library's
            _checked(library.seccomp_rule_add_array(context, denied, number, 0, None), f"deny {name} in")


def _checked(result: int, action: str) -> None:
    if result < 0:
        raise OSError(-result, f"{action} filter of system calls: {os.strerror(-result)}")
