"""The rights of a process, thread by thread, as the kernel has them in /proc.

A wall holds when every thread is behind it: a program's library may start a thread before the program gives up a right,
and the kernel keeps rights for each thread.
"""

import os
from collections.abc import Collection, Iterator

import msgspec

CAPABILITIES = {
    "chown": 0,
    "dac_override": 1,
    "dac_read_search": 2,
    "fowner": 3,
    "fsetid": 4,
    "kill": 5,
    "setgid": 6,
    "setuid": 7,
    "setpcap": 8,
    "linux_immutable": 9,
    "net_bind_service": 10,
    "net_broadcast": 11,
    "net_admin": 12,
    "net_raw": 13,
    "ipc_lock": 14,
    "ipc_owner": 15,
    "sys_module": 16,
    "sys_rawio": 17,
    "sys_chroot": 18,
    "sys_ptrace": 19,
    "sys_pacct": 20,
    "sys_admin": 21,
    "sys_boot": 22,
    "sys_nice": 23,
    "sys_resource": 24,
    "sys_time": 25,
    "sys_tty_config": 26,
    "mknod": 27,
    "lease": 28,
    "audit_write": 29,
    "audit_control": 30,
    "setfcap": 31,
    "mac_override": 32,
    "mac_admin": 33,
    "syslog": 34,
    "wake_alarm": 35,
    "block_suspend": 36,
    "audit_read": 37,
    "perfmon": 38,
    "bpf": 39,
    "checkpoint_restore": 40,
}
"""Source: linux/capability.h."""
NAMES = {number: name for name, number in CAPABILITIES.items()}
_SETS = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")


class ThreadRights(msgspec.Struct, frozen=True, kw_only=True):
    """What one thread may do. Source of the fields: proc(5), /proc/PID/status."""

    tid: int
    name: str
    user_ids: tuple[int, ...]
    """Real, effective, saved and of file systems."""
    group_ids: tuple[int, ...]
    inheritable: frozenset[int]
    permitted: frozenset[int]
    effective: frozenset[int]
    bounding: frozenset[int]
    ambient: frozenset[int]
    no_new_privs: bool
    filters: int
    """Of system calls (seccomp)."""

    @property
    def capabilities(self) -> frozenset[int]:
        """All that it has, or can gain by an exec."""
        gained = frozenset[int]() if self.no_new_privs else self.bounding
        return self.inheritable | self.permitted | self.effective | self.ambient | gained


def rights_of_threads(pid: int) -> tuple[ThreadRights, ...]:
    """The rights of each thread of the process, the first thread first; empty when it has gone. Raises OSError."""
    try:
        threads = sorted(int(name) for name in os.listdir(f"/proc/{pid}/task"))
    except FileNotFoundError:
        return ()
    return tuple(rights for tid in threads for rights in _rights(pid, tid))


def excess(pid: int, allowed: Collection[int]) -> str:
    """`thread 'x' (12) has sys_admin`: the first with a capability beside `allowed`; empty for none. Raises OSError."""
    for thread in rights_of_threads(pid):
        if more := sorted(thread.capabilities - set(allowed)):
            names = ", ".join(NAMES.get(number, str(number)) for number in more)
            return f"thread {thread.name!r} ({thread.tid}) has {names}"
    return ""


def _rights(pid: int, tid: int) -> Iterator[ThreadRights]:
    try:
        with open(f"/proc/{pid}/task/{tid}/status", encoding="utf-8", errors="replace") as file:
            fields = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    except (FileNotFoundError, ProcessLookupError):
        return  # the thread has ended
    inheritable, permitted, effective, bounding, ambient = (_bits(fields[name]) for name in _SETS)
    yield ThreadRights(
        tid=tid,
        name=fields["Name"],
        user_ids=tuple(map(int, fields["Uid"].split())),
        group_ids=tuple(map(int, fields["Gid"].split())),
        inheritable=inheritable,
        permitted=permitted,
        effective=effective,
        bounding=bounding,
        ambient=ambient,
        no_new_privs=fields["NoNewPrivs"] == "1",
        filters=int(fields.get("Seccomp_filters", 0)),
    )


def _bits(text: str) -> frozenset[int]:
    value = int(text, 16)
    return frozenset(number for number in range(value.bit_length()) if value >> number & 1)
