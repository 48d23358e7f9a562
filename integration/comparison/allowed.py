"""The differences between a container of pyshim and one of runc that are right, each with its reason."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import NamedTuple


class Allowed(NamedTuple):
    """Facts, as patterns of their names, that may differ."""

    facts: tuple[str, ...]
    what: str
    why: str
    scenes: tuple[str, ...] = ()
    """Only in these; empty: in all."""


ALLOWED = (
    Allowed(
        (
            *("files.root.type", "files.disk.type", "files.host.type", "mount./.*", "mount./disk.*", "mount./host.*"),
            *("mount./etc/hostname.*", "mount./etc/hosts.*", "mount./etc/resolv.conf.*"),
        ),
        "The root file system, volumes on disk and the files that the kubelet brings are of type `virtiofs`.",
        "They are the host's, shared with the guest. The flags of a mount are those of the pod's description; "
        "`nosuid` or `nodev` that the host's own file system has are not known to the guest.",
    ),
    Allowed(
        ("files.*.device_node",),
        "Device nodes cannot be made on a shared file system.",
        "The file server has no right to make one on the host. They can be made below `/dev` and in memory volumes.",
    ),
    Allowed(
        ("files.*.temporary_file", "files.root.handle", "files.*.acl"),
        "A shared file system has no `O_TMPFILE` and no access control lists; its files have handles.",
        "FUSE of the guest's kernel and the file server decide. Programs fall back to a named file.",
    ),
    Allowed(
        ("files.*.user_attribute", "files.*.trusted_attribute"),
        "Extended attributes of the name spaces `user` and `trusted`.",
        "[VOLUMES.md](VOLUMES.md) says which the file server passes on. tmpfs has those of users since Linux 6.6.",
    ),
    Allowed(
        ("files.memory.direct_io", "files.dev/shm.direct_io"),
        "Direct I/O in memory.",
        "tmpfs takes it since Linux 6.6, so with a guest of Debian 13.",
    ),
    Allowed(
        ("cgroup.*", "sys.fs/cgroup.*", "mount./sys/fs/cgroup*"),
        "The guest has cgroup v2, whatever the host has.",
        "The container's cgroup is one of the guest's kernel.",
    ),
    Allowed(
        (
            *("sysctl.fs/file-max", "sysctl.fs/inotify/max_user_watches", "sysctl.fs/protected_*"),
            *(
                "sysctl.kernel/dmesg_restrict",
                "sysctl.kernel/pid_max",
                "sysctl.kernel/threads-max",
                "sysctl.kernel/yama/*",
            ),
            *("sysctl.net/core/*",),
            *("sysctl.net/ipv4/tcp_congestion_control", "sysctl.net/ipv4/tcp_max_syn_backlog"),
            *("sysctl.net/ipv4/tcp_[rw]mem", "sysctl.user/max_user_namespaces", "sysctl.vm/*", "limit.SIGPENDING"),
        ),
        "Sysctls that no namespace has, and limits computed from the memory, are those of the guest's kernel.",
        "The VM is the machine, and its size the pod's. runc shows the host's, which its administrator tuned.",
    ),
    Allowed(
        ("call.bpf", "call.init_module", "call.kexec_load", "process.attr", "socket.alg"),
        "Which rare system calls and kinds of sockets the kernel has.",
        "The guest's kernel is another one than the host's.",
    ),
    Allowed(
        (
            *("proc.acpi.*", "proc.kcore.*", "proc.modules.*", "proc.schedstat.*", "proc.sysrq-trigger.*"),
            *("sys.block.*", "sys.class/net.*", "sys.devices/virtual/net.*", "sys.firmware.*", "sys.kernel/*"),
            *("sys.module.*", "sys.power/state.*"),
        ),
        "Which files `/proc` and `/sys` have, and which may be written where `/sys` is not read-only.",
        "They describe the guest's kernel and its devices, none of the host's.",
    ),
    Allowed(
        ("mount./proc/*", "mount./sys/firmware.*", "mount./dev/console.*"),
        "The mounts by which paths of `/proc` and `/sys` are masked or read-only.",
        "The guest's crun makes them in another way than runc; what can be read and written is the same.",
    ),
    Allowed(
        ("limit.CORE", "limit.NOFILE", "limit.OFILE", "limit.NPROC"),
        "Limits that the container's description does not name: 1048576 open files, no limit of processes and core "
        "files.",
        "They are those of containerd's unit as its project ships it. runc passes on what containerd was started with.",
    ),
    Allowed(
        ("signals.SigIgn",),
        "The signals 32 and 33 are ignored at first, with a guest of Debian 12.",
        "Its C library keeps them for itself in the guest's agent. So does that of a program: it sets their handlers.",
    ),
    Allowed(
        ("device./dev/core", "devices"),
        "`/dev/core`, a link to `/proc/kcore`.",
        "The guest's crun makes it, as the runtime specification allows.",
    ),
    Allowed(
        ("device./dev/null",),
        "Without standard input, a container's own `/dev/null` belongs to its user.",
        "The guest's crun gives the standard streams to the user; runc leaves out `/dev/null`.",
        scenes=("user",),
    ),
    Allowed(
        ("link.eth0.*", "ip -4 neigh*"),
        "`eth0` is a virtio network card with a queue.",
        "runc's is one end of a veth pair.",
    ),
    Allowed(
        ("device./dev/*", "device.opens.*"),
        "A privileged container has the devices of the guest.",
        "The host's are not plugged: a VM pod that could open the host's disks would be none "
        "([SECURITY.md](SECURITY.md)).",
        scenes=("privileged",),
    ),
)


def unexplained(scene: str, differences: dict[str, tuple[object, object]]) -> dict[str, tuple[object, object]]:
    """Those that no entry of the table allows in `scene`."""
    patterns = [pattern for one in ALLOWED if not one.scenes or scene in one.scenes for pattern in one.facts]
    return {
        name: values
        for name, values in differences.items()
        if not any(fnmatchcase(name, pattern) for pattern in patterns)
    }


def page() -> str:
    """The table of docs/DIFFERENCES.md."""
    rows = (f"| {one.what} | {one.why} |" for one in ALLOWED)
    return "\n".join(("| What differs | Why |", "|---|---|", *rows))


if __name__ == "__main__":
    print(page())
