"""Runs inside a container: prints what a process can see there, as one JSON object {fact: value}.

A fact that cannot be read is one, too: its value is `error: ERRNO`. Values are those that two containers of the same
description share; what names one container, a pid or a moment is left out or said as a relation.
Arguments: directories whose file system is tried.

Standard library only; no import of the project's.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import mmap
import os
import platform
import re
import resource
import select
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

FACTS: dict[str, object] = {}
LIBC = ctypes.CDLL(None, use_errno=True)


def fact(name: str, read: Callable[..., object], *arguments: object) -> None:
    """`read(*arguments)` is the fact's value."""
    try:
        FACTS[name] = read(*arguments)
    except OSError as error:
        FACTS[name] = f"error: {errno.errorcode.get(error.errno or 0, error.errno)}"
    except Exception as error:
        FACTS[name] = f"error: {type(error).__name__}"


def text_of(path: str) -> str:
    return Path(path).read_text(errors="replace").strip()


def opened(path: str, flags: int) -> str:
    os.close(os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY))
    return "opens"


# ---- the process


def status_of(pid: str) -> dict[str, str]:
    return dict(line.split(":\t", 1) for line in text_of(f"/proc/{pid}/status").splitlines() if ":\t" in line)


def process() -> None:
    status = status_of("self")
    for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp", "Uid", "Gid", "Umask"):
        fact(f"process.{name}", lambda name: status[name].replace("\t", " "), name)
    fact("process.groups", lambda: sorted(os.getgroups()))
    fact("process.cwd", os.getcwd)
    fact("process.environment", lambda: {k: v for k, v in sorted(os.environ.items()) if k not in ("HOSTNAME", "_")})
    fact("process.oom_score_adj", lambda: text_of("/proc/self/oom_score_adj"))
    fact("process.scheduler", lambda: os.sched_getscheduler(0))
    fact("process.personality", lambda: text_of("/proc/self/personality"))
    fact("process.coredump_filter", lambda: text_of("/proc/self/coredump_filter"))
    fact("process.timerslack", lambda: text_of("/proc/self/timerslack_ns"))
    fact("process.dumpable", lambda: LIBC.prctl(3, 0, 0, 0, 0))
    fact("process.subreaper", lambda: LIBC.prctl(37, ctypes.byref(ctypes.c_int()), 0, 0, 0))
    fact("process.loginuid", lambda: text_of("/proc/self/loginuid"))
    fact("process.attr", lambda: text_of("/proc/self/attr/current"))
    for name in sorted(dir(resource)):
        if name.startswith("RLIMIT_"):
            fact(f"limit.{name[7:]}", lambda name: list(resource.getrlimit(getattr(resource, name))), name)
    first = status_of("1")
    for name in ("SigBlk", "SigIgn", "SigCgt"):
        fact(f"signals.{name}", lambda name: status[name], name)
    fact("init.Seccomp", lambda: first["Seccomp"])
    fact("init.CapEff", lambda: first["CapEff"])
    fact("init.is_session_leader", lambda: os.getsid(1) == 1)
    fact("init.group", lambda: os.getpgid(1) == 1)
    fact("init.parent", lambda: first["PPid"])
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        fact(f"streams.{name}", lambda number: kind_of(os.fstat(number)), number)
        fact(f"streams.{name}.target", lambda number: os.readlink(f"/proc/self/fd/{number}").split(":")[0], number)
        fact(f"streams.{name}.tty", lambda number: os.isatty(number), number)
    fact("streams.more", lambda: sorted(int(n) for n in os.listdir("/proc/self/fd") if int(n) > 2)[:-1])
    for kind in ("cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts"):
        fact(
            f"namespace.{kind}",
            lambda kind: os.readlink(f"/proc/self/ns/{kind}") == os.readlink(f"/proc/1/ns/{kind}"),
            kind,
        )
    fact("namespace.uid_map", lambda: text_of("/proc/self/uid_map").split())
    fact("processes", lambda: sum(name.isdigit() for name in os.listdir("/proc")) < 6)


def kind_of(found: os.stat_result) -> str:
    kind = {stat.S_IFIFO: "fifo", stat.S_IFCHR: "device", stat.S_IFREG: "file", stat.S_IFSOCK: "socket"}
    rest = f" {os.major(found.st_rdev)}:{os.minor(found.st_rdev)}" if stat.S_ISCHR(found.st_mode) else ""
    return kind.get(stat.S_IFMT(found.st_mode), "other") + rest


# ---- what the kernel shows


def kernel() -> None:
    fact("kernel.machine", platform.machine)
    fact("kernel.page_size", mmap.PAGESIZE.__int__)
    for name in (
        "kernel/core_uses_pid kernel/dmesg_restrict kernel/keys/maxkeys kernel/msgmax kernel/msgmnb kernel/msgmni "
        "kernel/ngroups_max kernel/overflowuid kernel/panic kernel/pid_max kernel/randomize_va_space kernel/sem "
        "kernel/shmall kernel/shmmax kernel/shmmni kernel/threads-max kernel/unprivileged_bpf_disabled "
        "kernel/yama/ptrace_scope kernel/apparmor_restrict_unprivileged_userns "
        "fs/aio-max-nr fs/file-max fs/inotify/max_queued_events fs/inotify/max_user_instances "
        "fs/inotify/max_user_watches fs/mqueue/msg_max fs/nr_open fs/pipe-max-size fs/protected_fifos "
        "fs/protected_hardlinks fs/protected_regular fs/protected_symlinks fs/suid_dumpable "
        "net/core/somaxconn net/core/rmem_default net/core/rmem_max net/core/wmem_default net/core/wmem_max "
        "net/core/netdev_max_backlog net/core/default_qdisc net/ipv4/conf/all/rp_filter "
        "net/ipv4/conf/default/rp_filter "
        "net/ipv4/conf/all/accept_redirects net/ipv4/conf/all/arp_ignore net/ipv4/conf/all/arp_announce "
        "net/ipv4/conf/all/forwarding net/ipv4/ip_forward net/ipv4/ip_local_port_range net/ipv4/ip_nonlocal_bind "
        "net/ipv4/ip_unprivileged_port_start net/ipv4/ping_group_range net/ipv4/tcp_congestion_control "
        "net/ipv4/tcp_fin_timeout net/ipv4/tcp_keepalive_time net/ipv4/tcp_max_syn_backlog net/ipv4/tcp_mtu_probing "
        "net/ipv4/tcp_rmem net/ipv4/tcp_syncookies net/ipv4/tcp_timestamps net/ipv4/tcp_tw_reuse net/ipv4/tcp_wmem "
        "net/ipv6/conf/all/accept_ra net/ipv6/conf/all/disable_ipv6 net/ipv6/conf/all/forwarding "
        "net/ipv6/conf/default/accept_ra net/unix/max_dgram_qlen "
        "user/max_user_namespaces vm/max_map_count vm/mmap_min_addr vm/overcommit_memory vm/overcommit_ratio "
        "vm/swappiness vm/unprivileged_userfaultfd"
    ).split():
        fact(f"sysctl.{name}", lambda name: " ".join(text_of(f"/proc/sys/{name}").split()), name)
    for path in (
        "acpi asound bus/pci/devices cgroups cmdline cpuinfo devices diskstats filesystems fs/nfsd interrupts irq "
        "kallsyms kcore keys kmsg kpagecount latency_stats loadavg meminfo modules mounts net/dev partitions "
        "pressure/cpu sched_debug schedstat scsi self/cgroup slabinfo stat swaps sysrq-trigger sys/kernel/core_pattern "
        "timer_list uptime version vmallocinfo vmstat zoneinfo"
    ).split():
        fact(f"proc.{path}.readable", lambda path: readable(f"/proc/{path}"), path)
        fact(f"proc.{path}.writable", lambda path: writable(f"/proc/{path}"), path)
    for path in (
        "block class/net devices/virtual/net firmware fs/cgroup fs/fuse/connections kernel/debug kernel/mm "
        "kernel/security kernel/uevent_seqnum module power/state"
    ).split():
        fact(f"sys.{path}.readable", lambda path: readable(f"/sys/{path}"), path)
        fact(f"sys.{path}.writable", lambda path: writable(f"/sys/{path}"), path)
    fact("cgroup.kind", lambda: "v2" if os.path.exists("/sys/fs/cgroup/cgroup.controllers") else "v1")
    fact("cgroup.writable", makes_directory, "/sys/fs/cgroup/probe")
    fact("clock.resolution_ns", lambda: round(time.clock_getres(time.CLOCK_MONOTONIC) * 1e9))
    fact("clock.zone", lambda: time.tzname)
    fact("entropy", lambda: len(os.getrandom(64, os.GRND_NONBLOCK)))
    fact("cpus.affinity_is_all", lambda: len(os.sched_getaffinity(0)) == os.cpu_count())


def makes_directory(path: str) -> None:
    """It is gone at once: a privileged container of runc sees the cgroups of the host."""
    os.mkdir(path)
    os.rmdir(path)


def readable(path: str) -> str:
    if os.path.isdir(path):
        return "entries" if os.listdir(path) else "empty directory"
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if stat.S_ISCHR(os.fstat(fd).st_mode):
            return kind_of(os.fstat(fd))
        return "text" if os.read(fd, 64) else "empty"
    finally:
        os.close(fd)


def writable(path: str) -> str:
    """Opened for writing, never written; a directory gets a file."""
    if os.path.isdir(path):
        os.close(os.open(f"{path}/.probe", os.O_WRONLY | os.O_CREAT))
        os.unlink(f"{path}/.probe")
        return "files"
    return opened(path, os.O_WRONLY)


def mounts() -> None:
    for line in text_of("/proc/self/mountinfo").splitlines():
        own, _, rest = line.partition(" - ")
        where, options = own.split()[4:6]
        if where.startswith(("/usr", "/lib", "/probe")):  # the interpreter's
            continue
        kind, _, above = rest.split(" ", 2)
        known = ("ro", "rw", "nosuid", "nodev", "noexec", "noatime", "relatime", "nosymfollow")
        flags = ",".join(word for word in options.split(",") if word in known)
        sizes = [w for w in above.split(",") if w.split("=")[0] in ("mode", "size", "gid", "ptmxmode", "hidepid")]
        FACTS[f"mount.{where}.type"] = kind
        FACTS[f"mount.{where}.flags"] = flags
        FACTS[f"mount.{where}.options"] = ",".join(sizes)
        FACTS[f"mount.{where}.propagation"] = sorted({word.split(":")[0] for word in own.split()[6:]})
    for where in ("/", "/dev", "/dev/shm", "/proc", "/sys", "/tmp"):
        fact(f"statfs.{where}.name_max", lambda where: os.statvfs(where).f_namemax, where)
        fact(f"mode.{where}", lambda where: oct(os.stat(where).st_mode), where)


def devices() -> None:
    names = []
    for top, directories, files in os.walk("/dev"):
        directories[:] = [name for name in directories if name not in ("pts", "shm", "mqueue", "hugepages")]
        names += [f"{top}/{name}" for name in (*directories, *files)]
    FACTS["devices"] = sorted(names)
    for name in sorted(names):
        fact(f"device.{name}", lambda name: described(os.lstat(name)), name)
    for name in ("console", "fuse", "kmsg", "kvm", "loop-control", "mem", "net/tun", "port", "ptmx", "random", "tty"):
        fact(f"device.opens.{name}", lambda name: opened(f"/dev/{name}", os.O_RDWR), name)
    for name in ("null", "zero", "full", "random", "urandom"):
        fact(f"device.writes.{name}", lambda name: Path(f"/dev/{name}").write_bytes(b"x"), name)
    fact("device.terminal", lambda: len(os.openpty()))


def described(found: os.stat_result) -> str:
    return f"{oct(found.st_mode)} {found.st_uid}:{found.st_gid} {kind_of(found)}"


# ---- calls


def calls() -> None:
    numbers = {"x86_64": (165, 323, 425, 321, 298, 250, 248, 101, 272, 155, 169, 139, 246, 175)}
    names = (
        "mount userfaultfd io_uring_setup bpf perf_event_open keyctl add_key ptrace unshare_user pivot_root reboot "
        "sysfs kexec_load init_module"
    ).split()
    for name, number in zip(names, numbers.get(platform.machine(), ()), strict=False):
        fact(f"call.{name}", lambda name, number: in_child(name, number), name, number)
    for name, family, kind, protocol in (
        ("inet", socket.AF_INET, socket.SOCK_STREAM, 0),
        ("inet6", socket.AF_INET6, socket.SOCK_STREAM, 0),
        ("raw", socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP),
        ("ping", socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP),
        ("packet", socket.AF_PACKET, socket.SOCK_RAW, 0),
        ("netlink", socket.AF_NETLINK, socket.SOCK_RAW, 0),
        ("audit", socket.AF_NETLINK, socket.SOCK_RAW, 9),
        ("alg", socket.AF_ALG, socket.SOCK_SEQPACKET, 0),
        ("sctp", socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_SCTP),
        ("mptcp", socket.AF_INET, socket.SOCK_STREAM, 262),
    ):
        fact(f"socket.{name}", lambda f, k, p: socket.socket(f, k, p).close(), family, kind, protocol)
    fact("socket.bind_80", lambda: bound(80))
    fact("socket.bind_loopback6", lambda: bound(8080, socket.AF_INET6, "::1"))
    fact("call.chroot", lambda: forked(lambda: os.chroot("/tmp")))
    fact("call.sethostname", lambda: forked(lambda: socket.sethostname(socket.gethostname())))
    fact("call.nice_-5", lambda: forked(lambda: os.nice(-5)))
    fact("call.setuid_1", lambda: forked(lambda: os.setuid(1)))
    fact("call.mlock", lambda: forked(lambda: refuse(LIBC.mlockall(1))))
    fact("call.settimeofday", lambda: forked(lambda: time.clock_settime(time.CLOCK_REALTIME, time.time())))
    fact("call.queue", lambda: forked(lambda: refuse(LIBC.mq_open(b"/probe", os.O_CREAT | os.O_RDWR, 0o600, None))))
    fact("call.memfd", lambda: os.close(os.memfd_create("probe")))
    fact("call.pidfd", lambda: os.close(os.pidfd_open(os.getpid())))


def bound(port: int, family: int = socket.AF_INET, host: str = "127.0.0.1") -> str:
    with socket.socket(family, socket.SOCK_STREAM) as one:
        one.bind((host, port))
    return "bound"


def refuse(answer: int) -> None:
    if answer < 0:
        raise OSError(ctypes.get_errno(), "")


def forked(act: Callable[[], object]) -> str:
    """What `act` comes to, in a child that ends with it."""
    pid = os.fork()
    if pid == 0:
        try:
            act()
            os._exit(0)
        except OSError as error:
            os._exit(error.errno or 255)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return "done" if code == 0 else errno.errorcode.get(code, str(code))


def in_child(name: str, number: int) -> str:
    arguments = (0x10000000, 0, 0, 0, 0) if name == "unshare_user" else (0, 0, 0, 0, 0)
    return forked(lambda: refuse(LIBC.syscall(number, *arguments)))


# ---- the network


def network() -> None:
    fact("host.name_is_in_hosts", lambda: socket.gethostname() in text_of("/etc/hosts"))
    fact("host.domain", lambda: text_of("/proc/sys/kernel/domainname"))
    fact(
        "host.localhost",
        lambda: sorted(w.split()[0] for w in text_of("/etc/hosts").splitlines() if "localhost" in w),
    )
    fact("host.resolv_conf", lambda: text_of("/etc/resolv.conf").splitlines())
    fact("host.hostname_file", lambda: text_of("/etc/hostname") == socket.gethostname())
    fact("link.names", lambda: sorted(os.listdir("/sys/class/net")))
    for link in ("lo", "eth0"):
        for name in ("mtu", "type", "operstate", "tx_queue_len", "addr_assign_type"):
            fact(f"link.{link}.{name}", lambda link, name: text_of(f"/sys/class/net/{link}/{name}"), link, name)
    fact("link.lo.flags", lambda: text_of("/sys/class/net/lo/flags"))
    fact("link.eth0.flags", lambda: text_of("/sys/class/net/eth0/flags"))
    for words in (
        "-4 route show table main",
        "-6 route show table main",
        "-4 rule show",
        "-6 rule show",
        "-4 neigh show nud permanent",
    ):
        fact(f"ip {words}", lambda words: shown(words), words)
    fact("address.kinds", lambda: sorted(line.split()[2] for line in shown("-o address show") if len(line.split()) > 2))


def shown(words: str) -> list[str]:
    """Lines of `ip`, without what names this pod."""
    done = subprocess.run(["ip", *words.split()], capture_output=True, text=True, check=True)
    mine = [line.split()[3].split("/")[0] for line in own_addresses()]
    lines = []
    for line in done.stdout.splitlines():
        for address in mine:
            line = re.sub(rf"(?<![\w.:]){re.escape(address)}(?![\w.:])", "ADDRESS", line)
        lines.append(" ".join(line.split()))
    return sorted(lines)


def own_addresses() -> list[str]:
    done = subprocess.run(["ip", "-o", "address", "show", "dev", "eth0"], capture_output=True, text=True, check=False)
    return done.stdout.splitlines()


# ---- file systems


def file_system(directory: str) -> None:
    name = directory.strip("/") or "root"

    def tried(what: str, act: Callable[[str], object]) -> None:
        def inside() -> object:
            with tempfile.TemporaryDirectory(dir=directory) as place:
                return act(place)

        fact(f"files.{name}.{what}", inside)

    for what, act in FILES.items():
        tried(what, act)
    fact(f"files.{name}.mode", lambda: oct(os.stat(directory).st_mode))
    fact(f"files.{name}.owner", lambda: f"{os.stat(directory).st_uid}:{os.stat(directory).st_gid}")
    fact(f"files.{name}.type", lambda: next(m.split()[2] for m in reversed(mount_lines()) if m.split()[1] == directory))


def mount_lines() -> list[str]:
    return text_of("/proc/self/mounts").splitlines()


def made(path: str, data: bytes = b"data") -> str:
    Path(path).write_bytes(data)
    return path


def directory(d: str) -> object:
    os.mkdir(f"{d}/d")
    return oct(os.stat(f"{d}/d").st_mode)


def symbolic_link(d: str) -> object:
    os.symlink("x", f"{d}/l")
    return os.readlink(f"{d}/l")


def truncated(d: str) -> object:
    os.truncate(made(f"{d}/a"), 2)
    return os.stat(f"{d}/a").st_size


def access_mode_0(d: str) -> object:
    os.chmod(made(f"{d}/a"), 0)
    return os.access(f"{d}/a", os.R_OK)


def sticky(d: str) -> object:
    os.chmod(d, 0o1777)
    return oct(os.stat(d).st_mode)


def set_group_id_directory(d: str) -> object:
    os.chmod(d, 0o2775)
    os.mkdir(f"{d}/d")
    return oct(os.stat(f"{d}/d").st_mode)


def appended(d: str) -> object:
    with open(made(f"{d}/a"), "ab") as file:
        file.write(b"x")
    return Path(f"{d}/a").read_text()


def hard_link(d: str) -> object:
    os.link(made(f"{d}/a"), f"{d}/b")
    return os.stat(f"{d}/a").st_nlink, os.stat(f"{d}/a").st_ino == os.stat(f"{d}/b").st_ino


def rename_over(d: str) -> object:
    before = os.stat(made(f"{d}/a")).st_ino
    made(f"{d}/b", b"old")
    os.rename(f"{d}/a", f"{d}/b")
    return os.stat(f"{d}/b").st_ino == before


def unlinked_but_open(d: str) -> object:
    with open(made(f"{d}/a"), "rb") as file:
        os.unlink(f"{d}/a")
        return file.read(), os.fstat(file.fileno()).st_nlink


def unix_socket(d: str) -> object:
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(f"{d}/s")
        server.listen()
        client.connect(f"{d}/s")
    return "connected"


def fifo_meets(d: str) -> object:
    os.mkfifo(f"{d}/p")
    fd = os.open(f"{d}/p", os.O_RDWR | os.O_NONBLOCK)
    os.write(fd, b"x")
    return os.read(fd, 1).decode()


def attribute(key: str, value: bytes = b"v") -> Callable[[str], object]:
    def act(d: str) -> object:
        os.setxattr(made(f"{d}/a"), key, value)
        return os.getxattr(f"{d}/a", key).hex()

    return act


def lock_by(take: Callable[[int, int], object]) -> Callable[[str], object]:
    def act(d: str) -> object:
        with open(made(f"{d}/a"), "r+b") as file:
            take(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)

            def other() -> None:
                with open(f"{d}/a", "r+b") as again:
                    take(again.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)

            return forked(other)

    return act


def lease(d: str) -> object:
    with open(made(f"{d}/a"), "rb") as file:
        fcntl.fcntl(file.fileno(), fcntl.F_SETLEASE, fcntl.F_RDLCK)
    return "granted"


def shared_mapping(d: str) -> object:
    with open(made(f"{d}/a", bytes(8192)), "r+b") as file, mmap.mmap(file.fileno(), 8192) as mapping:
        mapping[4096] = 7
        mapping.flush()
        return Path(f"{d}/a").read_bytes()[4096]


def temporary_file(d: str) -> object:
    fd = os.open(d, os.O_RDWR | os.O_TMPFILE, 0o600)
    os.close(fd)
    return "made"


def direct_io(d: str) -> object:
    os.close(os.open(f"{d}/a", os.O_RDWR | os.O_CREAT | os.O_DIRECT))
    return "opened"


def allocated(mode: int) -> Callable[[str], object]:
    def act(d: str) -> object:
        with open(made(f"{d}/a", bytes(65536)), "r+b") as file:
            ctypes.set_errno(0)
            refuse(LIBC.fallocate(file.fileno(), mode, ctypes.c_long(0), ctypes.c_long(32768)))
            return os.fstat(file.fileno()).st_size

    return act


def hole(d: str) -> object:
    with open(f"{d}/a", "w+b") as file:
        file.truncate(1 << 20)
        file.seek(1 << 19)
        file.write(b"x")
        file.flush()
        return os.lseek(file.fileno(), 0, os.SEEK_DATA) > 0


def watched(d: str) -> object:
    fd = LIBC.inotify_init1(os.O_NONBLOCK)
    refuse(LIBC.inotify_add_watch(fd, d.encode(), 0x100))  # IN_CREATE
    made(f"{d}/a")
    found = select.select([fd], [], [], 5)[0]
    os.close(fd)
    return bool(found)


def set_user_id(d: str) -> object:
    os.chmod(made(f"{d}/a"), 0o6755)
    with open(f"{d}/a", "ab") as file:
        file.write(b"more")
    return oct(os.stat(f"{d}/a").st_mode)


def times(d: str) -> object:
    os.utime(made(f"{d}/a"), ns=(1_234_567_891, 987_654_321_987_654_321))
    return os.stat(f"{d}/a").st_mtime_ns


def owned(d: str) -> object:
    os.chown(made(f"{d}/a"), 1234, 4321)
    return os.stat(f"{d}/a").st_uid, os.stat(f"{d}/a").st_gid


def executed(d: str) -> object:
    made(f"{d}/a", b"#!/bin/sh\nexit 7\n")
    os.chmod(f"{d}/a", 0o755)
    return subprocess.run([f"{d}/a"], check=False).returncode


def device_node(d: str) -> object:
    os.mknod(f"{d}/n", stat.S_IFCHR | 0o600, os.makedev(1, 3))
    with open(f"{d}/n", "rb") as file:
        return file.read(1) == b""


def default_acl(d: str) -> object:
    entries = struct.pack("<I", 2) + b"".join(
        struct.pack("<HHI", tag, rights, -1 & 0xFFFFFFFF) for tag, rights in ((1, 7), (4, 5), (32, 0))
    )
    os.setxattr(d, "system.posix_acl_default", entries)
    return oct(os.stat(made(f"{d}/a")).st_mode)


def copied(d: str) -> object:
    made(f"{d}/a", b"x" * 5000)
    with open(f"{d}/a", "rb") as source, open(f"{d}/b", "wb") as target:
        return os.copy_file_range(source.fileno(), target.fileno(), 5000)


def sent(d: str) -> object:
    made(f"{d}/a", b"x" * 5000)
    with open(f"{d}/a", "rb") as source, open(f"{d}/b", "wb") as target:
        return os.sendfile(target.fileno(), source.fileno(), 0, 5000)


def many(d: str) -> object:
    for number in range(300):
        made(f"{d}/{number}")
    return len(os.listdir(d)), all(entry.is_file() for entry in os.scandir(d))


def synced(d: str) -> object:
    with open(made(f"{d}/a"), "r+b") as file:
        os.fsync(file.fileno())
        os.fdatasync(file.fileno())
        fd = os.open(d, os.O_RDONLY)
        os.fsync(fd)
        refuse(LIBC.syncfs(fd))
        os.close(fd)
    return "synced"


def exclusive(d: str) -> object:
    made(f"{d}/a")
    with contextlib.suppress(FileExistsError):
        os.open(f"{d}/a", os.O_CREAT | os.O_EXCL | os.O_RDWR)
        return "opened twice"
    return "refused"


def moved_exchange(d: str) -> object:
    made(f"{d}/a"), made(f"{d}/b", b"other")
    refuse(LIBC.renameat2(-100, f"{d}/a".encode(), -100, f"{d}/b".encode(), 2))  # RENAME_EXCHANGE
    return Path(f"{d}/a").read_text()


def by_handle(d: str) -> object:
    handle = ctypes.create_string_buffer(struct.pack("Ii", 128, 0) + bytes(128))
    refuse(LIBC.name_to_handle_at(-100, made(f"{d}/a").encode(), handle, ctypes.byref(ctypes.c_int()), 0))
    return "named"


FILES: dict[str, Callable[[str], object]] = {
    "create": lambda d: oct(os.stat(made(f"{d}/a")).st_mode),
    "directory": directory,
    "symbolic_link": symbolic_link,
    "long_name": lambda d: len(os.path.basename(made(f"{d}/{'n' * 255}"))),
    "too_long_name": lambda d: made(f"{d}/{'n' * 256}"),
    "odd_name": lambda d: made(f"{d}/\udcff \n").encode(errors="surrogateescape").hex()[-8:],
    "truncate": truncated,
    "append": appended,
    "access_mode_0": access_mode_0,
    "sticky": sticky,
    "set_group_id_directory": set_group_id_directory,
    "birth_time": lambda d: bool(os.stat(made(f"{d}/a")).st_ctime_ns),
    "hard_link": hard_link,
    "rename_over": rename_over,
    "exchange": moved_exchange,
    "unlinked_but_open": unlinked_but_open,
    "exclusive": exclusive,
    "unix_socket": unix_socket,
    "fifo": fifo_meets,
    "user_attribute": attribute("user.probe"),
    "trusted_attribute": attribute("trusted.probe"),
    "capability": attribute("security.capability", bytes.fromhex("0100000200040000" + "00" * 12)),
    "acl": default_acl,
    "flock": lock_by(fcntl.flock),
    "record_lock": lock_by(fcntl.lockf),
    "lease": lease,
    "shared_mapping": shared_mapping,
    "temporary_file": temporary_file,
    "direct_io": direct_io,
    "allocate": allocated(0),
    "punch_hole": allocated(3),
    "zero_range": allocated(16),
    "hole": hole,
    "inotify": watched,
    "set_user_id_after_write": set_user_id,
    "times": times,
    "owner": owned,
    "execute": executed,
    "device_node": device_node,
    "copy_file_range": copied,
    "sendfile": sent,
    "many": many,
    "sync": synced,
    "handle": by_handle,
}


def main() -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    process()
    kernel()
    mounts()
    devices()
    calls()
    network()
    for directory in sys.argv[1:]:
        file_system(directory)
    json.dump(FACTS, sys.stdout, sort_keys=True, default=str)


if __name__ == "__main__":
    main()
