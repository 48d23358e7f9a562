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
    "sys_ptrace": 19,  # to read /proc of processes of other users; the filter denies the call
    "sys_admin": 21,  # mounts, namespaces, device programs
    "sys_nice": 23,  # to pin the threads of QEMU's user
    "sys_resource": 24,
    "mknod": 27,  # hooks, and virtiofsd with --modcaps=+mknod
    "setfcap": 31,
}
"""Source of the numbers: linux/capability.h."""
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
"""They return EPERM, also under their numbers in the 32-bit and x32 tables."""

_LIBRARY = "libseccomp.so.2"
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_BAD_ARCHITECTURE, _OPTIMIZE = 2, 8
_BINARY_TREE = 2
_X86, _X86_64, _X32 = 0x40000003, 0xC000003E, 0x4000003E
_UNKNOWN_CALL = -1
"""Source: seccomp.h of libseccomp 2.5; linux/audit.h."""


def give_up_capabilities() -> None:
    """This thread, those it starts and all programs they execute have KEPT_CAPABILITIES at most. Raises OSError."""
    syscalls.limit_capabilities_of_programs(KEPT_CAPABILITIES.values())
    syscalls.limit_capabilities_of_thread(KEPT_CAPABILITIES.values())


def has_filter() -> bool:
    """`deny_calls` finds its library."""
    try:
        ctypes.CDLL(_LIBRARY)
    except OSError:
        return False
    return True


def deny_calls() -> bool:
    """All threads of this process and their children get EPERM for DENIED_CALLS; False if libseccomp is missing.

    They gain no rights by an exec from now on either. Raises OSError.
    """
    if not has_filter():
        return False
    syscalls.filter_calls(filter_program())
    return True


@cache
def filter_program() -> bytes:
    """The filter as the kernel takes it. Raises OSError, also where libseccomp is missing.

    libseccomp takes 1 MiB and more of memory to make it, so the zygote does that once for all its forks.
    """
    library = ctypes.CDLL(_LIBRARY)
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_ALLOW)))
    try:
        _fill(library, context)
        with open(os.memfd_create("filter", os.MFD_CLOEXEC), "rb") as file:
            _checked(library.seccomp_export_bpf(context, file.fileno()), "write")
            file.seek(0)
            return file.read()
    finally:
        library.seccomp_release(context)


def _fill(library: ctypes.CDLL, context: ctypes.c_void_p) -> None:
    denied = ctypes.c_uint32(_ERRNO | errno.EPERM)
    _checked(library.seccomp_attr_set(context, _BAD_ARCHITECTURE, denied), "set up")
    library.seccomp_attr_set(context, _OPTIMIZE, ctypes.c_uint32(_BINARY_TREE))  # from 2.5 on; a matter of speed only
    library.seccomp_arch_native.restype = ctypes.c_uint32
    if library.seccomp_arch_native() == _X86_64:
        for architecture in (_X86, _X32):
            _checked(library.seccomp_arch_add(context, ctypes.c_uint32(architecture)), "set up")
    for name in DENIED_CALLS:
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number != _UNKNOWN_CALL:  # of a later kernel than this library's
            _checked(library.seccomp_rule_add_array(context, denied, number, 0, None), f"deny {name} in")


def _checked(result: int, action: str) -> None:
    if result < 0:
        raise OSError(-result, f"{action} filter of system calls: {os.strerror(-result)}")
