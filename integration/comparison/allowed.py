"""The differences between a container of pyshim and one of runc that are right, each with its reason."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple


class Allowed(NamedTuple):
    """Facts, as patterns of their names, that may differ."""

    facts: tuple[str, ...]
    what: str
    why: str
    scenes: tuple[str, ...] = ()
    """Only in these; empty: in all."""
    on: str = ""
    """On which nodes it is seen; empty: on all, so that a pattern that no scene needs is a mistake."""


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
        ("files.*.temporary_file", "files.root.handle"),
        "A shared file system has no `O_TMPFILE`; the files of a root file system have handles.",
        "FUSE of the guest's kernel and the file server decide. Programs fall back to a named file.",
    ),
    Allowed(
        ("files.*.acl",),
        "A shared file system has no access control lists.",
        "The file server takes them with `--posix-acl` only ([VOLUMES.md](VOLUMES.md)).",
        on="where the host's file system has them",
    ),
    Allowed(
        ("files.*.trusted_attribute",),
        "Extended attributes of the name space `trusted`.",
        "The file server has no right to set them on the host ([VOLUMES.md](VOLUMES.md)).",
        scenes=("privileged",),
    ),
    Allowed(
        (
            "files.memory.direct_io",
            "files.dev/shm.direct_io",
            "files.memory.user_attribute",
            "files.dev/shm.user_attribute",
        ),
        "Direct I/O and extended attributes of users in memory.",
        "tmpfs has both since Linux 6.6, so with a guest of Debian 13.",
        on="where one of the kernels is older than 6.6, and the other is not",
    ),
    Allowed(
        ("mount./settings.options",),
        "The copies of configuration files name the size of their tmpfs.",
        "The template had less memory than the pod, so a clone's mounts in memory are given the size that they would "
        "have after a boot.",
        on="where the VM continues from a template",
    ),
    Allowed(
        ("files.root.direct_io", "files.root.user_attribute"),
        "The same on a root file system whose image is disks.",
        "What is written to it lies in the guest's memory ([IMAGES.md](IMAGES.md)).",
        scenes=("disks",),
        on="with a guest of Debian 12",
    ),
    Allowed(
        ("cgroup.*", "sys.fs/cgroup.*", "mount./sys/fs/cgroup*"),
        "The guest has cgroup v2, whatever the host has.",
        "The container's cgroup is one of the guest's kernel.",
        on="where the host has version 1",
    ),
    Allowed(
        (
            *("sysctl.fs/file-max", "sysctl.fs/inotify/max_user_watches", "sysctl.fs/protected_*"),
            *(
                "sysctl.kernel/dmesg_restrict",
                "sysctl.kernel/panic",
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
        on="where the host has other values",
    ),
    Allowed(
        ("call.bpf", "call.init_module", "call.kexec_load", "process.attr", "socket.alg"),
        "Which rare system calls and kinds of sockets the kernel has.",
        "The guest's kernel is another one than the host's.",
        on="where the kernels differ so",
    ),
    Allowed(
        (
            *("proc.acpi.*", "proc.kcore.*", "proc.modules.*", "proc.schedstat.*", "proc.sysrq-trigger.*"),
            *("sys.block.*", "sys.class/net.*", "sys.devices/virtual/net.*", "sys.firmware.*", "sys.kernel/*"),
            *("sys.module.*", "sys.power/state.*"),
        ),
        "Which files `/proc` and `/sys` have, and which may be written where `/sys` is not read-only.",
        "They describe the guest's kernel and its devices, none of the host's.",
        on="where the kernels differ so",
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
        on="where containerd was started with others",
    ),
    Allowed(
        ("signals.SigIgn",),
        "The signals 32 and 33 are ignored at first, with a guest of Debian 12.",
        "Its C library keeps them for itself in the guest's agent. So does that of a program: it sets their handlers.",
        on="with a guest of Debian 12",
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
        ("link.eth0.*",),
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


def unexplained(scene: str, differences: Mapping[str, object]) -> list[str]:
    """The facts of those that no entry of the table allows in `scene`."""
    patterns = [pattern for one in ALLOWED if _is_of(one, scene) for pattern in one.facts]
    return [name for name in differences if not any(fnmatchcase(name, pattern) for pattern in patterns)]


def unneeded(differences: Mapping[str, Collection[str]]) -> list[str]:
    """The table's patterns that match none of the facts that differ, by scene; without those of some nodes only."""
    return [
        pattern
        for one in ALLOWED
        for pattern in one.facts
        if not one.on
        and not any(
            fnmatchcase(name, pattern) for scene, names in differences.items() if _is_of(one, scene) for name in names
        )
    ]


def _is_of(one: Allowed, scene: str) -> bool:
    return not one.scenes or scene in one.scenes


def page() -> str:
    """The table of docs/DIFFERENCES.md."""
    rows = (f"| {one.what} | {one.why} |" for one in ALLOWED)
    return "\n".join(("| What differs | Why |", "|---|---|", *rows))


def figures(reports: Sequence[Path]) -> str:
    """A table of the reports of `test_differences.py`: each scene's facts, and how many differ and are allowed."""
    rows = []
    for report in reports:
        found = json.loads(report.read_text())
        different, others = len(found["different"]), len(unexplained(report.stem, found["different"]))
        rows.append((report.parent.name, report.stem, found["facts"], different, different - others, others))
    lines = [("guest", "scene", "facts", "differ", "allowed", "others"), *rows]
    return "\n".join("  ".join(f"{cell!s:<12}" for cell in line).rstrip() for line in lines)


if __name__ == "__main__":
    print(figures([Path(name) for name in sys.argv[1:]]) if sys.argv[1:] else page())
