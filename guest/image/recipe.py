"""What goes into the guest: data only, each list with the reason for what is on it."""

from typing import Final

# Every file in the image carries this time: 2024-01-01T00:00:00Z. A build must not depend on when it ran.
MTIME_S: Final = 1_704_067_200
ROOT_IMAGE_UUID: Final = "5f0b1c86-5a0e-4f0e-8f4e-6f6d5d1e8a10"

KERNEL_PACKAGE: Final = "linux-image-cloud-amd64"

# Packages whose files are taken; their dependencies follow by themselves.
PACKAGES: Final = (
    KERNEL_PACKAGE,
    "busybox-static",
    "crun",
    "e2fsprogs",
    "libpython3.11-minimal",
    "libpython3.11-stdlib",
    "python3.11-minimal",
    "python3-yaml",
)

# Modules of Python packages beside the standard library, by Debian package. Drivers' tools write CDI specs as YAML
# (nvidia-ctk does unless told otherwise); the agent imports this when it meets one, and not before.
PYTHON_LIBRARIES: Final = {"python3-yaml": "yaml"}

# Tools that run on the build machine, out of their unpacked packages.
TOOL_PACKAGES: Final = ("erofs-utils", "lz4")

# Dependencies that nothing selected below needs: maintainer scripts, and libraries of extension modules that are left
# out.
WITHOUT_PACKAGES: Final = frozenset(
    {
        "debconf",
        "gcc-12-base",
        "initramfs-tools",
        "kmod",
        "libbz2-1.0",
        "libdb5.3",
        "libcrypt1",
        "libncursesw6",
        "libnsl2",
        "libreadline8",
        "libsqlite3-0",
        "libss2",
        "libtinfo6",
        "libtirpc3",
        "libyaml-0-2",
        "linux-base",
        "logsave",
        "media-types",
        "python3",
    }
)

PROGRAMS: Final = ("usr/bin/crun", "usr/bin/python3.11", "sbin/mke2fs", "sbin/resize2fs")

# Libraries that a program names and does not use here: each start of it would load them, and what they need in turn.
# crun asks systemd for cgroups, by D-Bus, only when told to (`--cgroup-manager=systemd`); it tells it that a container
# is up only with NOTIFY_SOCKET set, and logs to its journal only with `--log=journald:`. The agent does none of it.
WITHOUT_LIBRARIES: Final = {"usr/bin/crun": ("libsystemd.so.0",)}

PACKAGE_FILES: Final = ("etc/mke2fs.conf",)

# Nodes whose opening makes the kernel ask for the module, as kmod's static nodes do on a full system: path, major,
# minor.
STATIC_NODES: Final = (("/dev/loop-control", 10, 237), ("/dev/net/tun", 10, 200))

# Loaded by dlopen, so no file names it as needed: glibc wants it when a thread is cancelled.
EXTRA_LIBRARIES: Final = ("libgcc_s.so.1",)

# BusyBox is there for the debug shell, and as the `modprobe` the kernel calls for a module on demand.
BUSYBOX_APPLETS: Final = (
    *(
        "ash",
        "base64",
        "blkid",
        "cat",
        "chmod",
        "chroot",
        "clear",
        "cp",
        "cttyhack",
        "cut",
        "date",
        "dd",
        "df",
        "dmesg",
    ),
    *(
        "du",
        "echo",
        "env",
        "false",
        "find",
        "free",
        "grep",
        "head",
        "hexdump",
        "hostname",
        "id",
        "insmod",
        "ip",
        "kill",
    ),
    *("less", "ln", "losetup", "ls", "lsmod", "mkdir", "mknod", "modprobe", "more", "mount", "mv", "nc", "od", "ping"),
    *("poweroff", "ps", "pwd", "readlink", "reboot", "rm", "rmdir", "rmmod", "sed", "setsid", "sh", "sleep", "sort"),
    *("stat", "strings", "stty", "sync", "tail", "tar", "test", "time", "timeout", "top", "touch", "tr", "true"),
    *("umount", "uname", "uptime", "vi", "wc", "which", "xargs"),
)

# In the initrd, in loading order: entropy first, because the interpreter waits for it when the CPU has no RDRAND
# (more than half a bare boot under TCG with -cpu qemu64); then what the console and the root image need.
LOADER_MODULES: Final = ("virtio_pci", "virtio_mmio", "virtio_rng", "virtio_console", "virtio_blk", "erofs")

# Loaded from the root image behind the agent's back, lowest priority, most wanted first: drivers of devices nobody
# asks for by name. Anything else the kernel asks `modprobe` for: file systems by mount, address families by socket.
BACKGROUND_MODULES: Final = ("virtiofs", "overlay", "virtio_net", "virtio_scsi", "sd_mod", "virtio_mem")

# In the root image for loading on demand.
ON_DEMAND_MODULES: Final = (
    *("vsock", "vmw_vsock_virtio_transport", "vsock_loopback"),
    *("virtio_balloon", "virtio_pmem", "nd_pmem"),
    *("loop", "xfs", "btrfs", "vfat", "isofs", "squashfs", "dm_mod", "dm_verity", "dm_crypt", "ecb", "xts"),
    *("tun", "veth", "bridge", "br_netfilter", "macvlan", "macvtap", "ipvlan", "vxlan", "dummy", "8021q"),
    *("nf_tables", "nft_compat", "nft_chain_nat", "nft_masq", "nft_nat", "nft_ct", "nft_log", "nft_reject_inet"),
    *("ip_tables", "iptable_filter", "iptable_nat", "iptable_mangle", "iptable_raw"),
    *("ip6_tables", "ip6table_filter", "ip6table_nat", "ip6table_mangle", "ip6table_raw", "ipt_REJECT", "ip6t_REJECT"),
    *("xt_conntrack", "xt_MASQUERADE", "xt_comment", "xt_addrtype", "xt_tcpudp", "xt_multiport", "xt_mark", "xt_nat"),
    *(
        "xt_REDIRECT",
        "xt_TPROXY",
        "xt_owner",
        "xt_statistic",
        "xt_LOG",
        "nf_conntrack_netlink",
        "inet_diag",
        "unix_diag",
    ),
    *("sch_ingress", "sch_htb", "cls_u32", "cls_flower", "act_mirred", "cls_matchall", "sch_tbf", "sch_netem"),
    *("binfmt_misc", "configfs", "autofs4", "nfsv4", "vfio_pci"),
)

# Directories and modules of the standard library the agent has no use for.
STDLIB_WITHOUT: Final = frozenset(
    {
        *(
            "__phello__",
            "__pycache__",
            "config-3.11-x86_64-linux-gnu",
            "ctypes/macholib",
            "ctypes/test",
            "curses",
            "dbm",
        ),
        *("distutils", "ensurepip", "idlelib", "lib2to3", "msilib", "pydoc_data", "sqlite3", "test", "tkinter"),
        *(
            "turtledemo",
            "unittest",
            "venv",
            "wsgiref",
            "xmlrpc",
            "asyncio/windows_events.py",
            "asyncio/windows_utils.py",
        ),
        *(
            "antigravity.py",
            "this.py",
            "turtle.py",
            "pydoc.py",
            "doctest.py",
            "sitecustomize.py",
            "_sysconfigdata__linux_x86_64-linux-gnu.py",
        ),
        *("_sysconfigdata__x86_64-linux-gnu.py", "lib-dynload"),
    }
)

EXTENSION_MODULES: Final = (
    "_asyncio",
    "_contextvars",
    "_ctypes",
    "_json",
    "_lzma",
    "_queue",
    "_ssl",
    "_uuid",
    "mmap",
    "resource",
    "termios",
)

# Of the standard library, what the agent imports before it answers its first calls: it travels in the agent's bundle.
BUNDLED_STDLIB: Final = (
    *(
        "__future__",
        "collections",
        "collections.abc",
        "ctypes",
        "ctypes._endian",
        "enum",
        "functools",
        "heapq",
        "keyword",
        "operator",
    ),
    *("reprlib", "struct", "types"),
)

# Our own code, by folder of the checkout: the agent reads the wire itself, so neither protobuf nor the generated
# modules come along (importing them costs the guest more than starting the interpreter). `pyshim` itself is a package:
# its __init__ comes along.
AGENT_SOURCES: Final = (
    *("guest/__init__.py", "guest/agent", "guest/forwarder", "guest/snapshot"),
    *("pyshim/__init__.py", "pyshim/cdi", "pyshim/ttrpc"),
)

EMPTY_DIRECTORIES: Final = ("dev", "etc", "mnt", "proc", "root", "run", "sys", "tmp", "var/lib", "var/log")

ETC_FILES: Final = {
    "etc/group": "root:x:0:\n",
    "etc/hostname": "",
    "etc/hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "etc/os-release": 'ID=pyshim-guest\nNAME="pyshim guest"\nPRETTY_NAME="pyshim guest (Debian 12 packages)"\n',
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\n",
    "etc/resolv.conf": "",
}
