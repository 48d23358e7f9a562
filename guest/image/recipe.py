"""The contents of the guest, as data, with the reasons."""

from dataclasses import dataclass
from typing import Final

MTIME_S: Final = 1_704_067_200
"""The time of every file in the images, 2024-01-01T00:00:00Z: a build does not depend on its time."""
ROOT_IMAGE_UUID: Final = "5f0b1c86-5a0e-4f0e-8f4e-6f6d5d1e8a10"


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A processor that a guest can be built for. Its packages need not run on the host."""

    name: str
    """Debian's name."""
    machine: str
    """The kernel's, as `uname -m` says it."""
    triplet: str
    """The directory of its libraries."""
    loader: str
    """The file name of the program that starts those linked to glibc."""
    later_modules: tuple[str, ...] = ()
    on_demand_modules: tuple[str, ...] = ()
    """What only its kernel has, in addition to LATER_MODULES and ON_DEMAND_MODULES."""


ARCHITECTURES: Final = (
    Architecture(
        name="amd64",
        machine="x86_64",
        triplet="x86_64-linux-gnu",
        loader="ld-linux-x86-64.so.2",
        later_modules=("pvpanic_mmio",),
        on_demand_modules=("cpuid", "msr", "ptp_kvm"),
    ),
    Architecture(name="arm64", machine="aarch64", triplet="aarch64-linux-gnu", loader="ld-linux-aarch64.so.1"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """What differs between the releases of Debian of which a guest can be built."""

    codename: str
    release: str
    python: str
    """The interpreter that runs the agent."""
    decompressor: str
    """The package, and its program, that unpacks the kernel in a bzImage."""
    snapshot: str = ""
    """A time of Debian's snapshot service, as in 20260101T000000Z; empty: the newest packages of the mirror."""

    def names(self, packages: tuple[str, ...]) -> tuple[str, ...]:
        """`packages`, a list of this recipe, by their names in this suite."""
        return tuple(name.format(python=self.python, decompressor=self.decompressor) for name in packages)


SUITES: Final = (
    # Linux 6.12: FUSE passes supplementary groups to the host (6.3 and later). It takes vCPUs that are plugged after
    # boot only where it knows the hypervisor: KVM, not QEMU's emulation. Source: acpi_is_processor_usable of
    # arch/x86/kernel/acpi/boot.c.
    Suite(codename="trixie", release="13", python="python3.13", decompressor="zstd"),
    # Linux 6.1 takes plugged vCPUs under emulation too; FUSE of it passes no supplementary groups.
    Suite(codename="bookworm", release="12", python="python3.11", decompressor="lz4"),
)
"""The first is the default."""

SNAPSHOTS: Final = "http://snapshot.debian.org/archive/{archive}/{date}"
"""Address of an archive (`debian`, `debian-security`) as it was at a time."""

KEYRINGS: Final = tuple(f"/usr/share/keyrings/debian-archive-keyring.{kind}" for kind in ("gpg", "pgp"))
"""Where the package debian-archive-keyring of Debian, Ubuntu, Fedora and others has Debian's keys."""

KERNEL_PACKAGE: Final = "linux-image-cloud-{architecture}"

# Packages that are unpacked into the root image, with all they depend on.
PACKAGES: Final = (
    "busybox-static",
    "crun",
    "e2fsprogs",
    "lib{python}-stdlib",
    "libstdc++6",  # protobuf's extension module is C++
    "{python}-minimal",
    "python3-yaml",  # drivers' tools write CDI specs as YAML
)

# Packages whose programs build the images, run with their own libraries: the bits do not depend on the host's versions.
BUILD_PACKAGES: Final = ("busybox-static", "cpio", "erofs-utils", "{decompressor}")

# With them, where the guest's own interpreter does not run on the host: the same one for the host compiles its modules.
COMPILER_PACKAGES: Final = ("lib{python}-stdlib", "{python}-minimal")

# Dependencies that are not followed.
WITHOUT_PACKAGES: Final = frozenset(
    {
        *("debconf", "initramfs-tools", "kmod", "linux-base"),  # of the kernel's maintainer scripts
        *("gcc-12-base", "gcc-14-base"),  # documentation only
        "python3",  # the interpreter is here already; this would bring dpkg
        # Libraries of _curses, _dbm, _sqlite3, nis and readline: these extension modules cannot be imported.
        *("libdb5.3", "libdb5.3t64", "libncursesw6", "libnsl2", "libreadline8", "libreadline8t64", "libsqlite3-0"),
        *("libtinfo6", "libtirpc3"),
    }
)

KATA_AGENT: Final = "usr/bin/kata-agent"
"""The path of Kata's agent in a root image, for the first process."""

# Packages of a root image with a given kata-agent: what it calls, and the libraries of one that is linked to glibc.
KATA_PACKAGES: Final = ("busybox-static", "e2fsprogs", "libgcc-s1", "libseccomp2")

# Left out of the packages, by path in the package.
WITHOUT_PATHS: Final = frozenset(
    {
        "usr/share",  # documentation and translations
        # Character sets that Python converts itself.
        *(f"usr/lib/{architecture.triplet}/gconv" for architecture in ARCHITECTURES),
        *("lib/systemd", "usr/lib/systemd", "etc/cron.d", "etc/init.d"),  # there is no init system
        *(
            f"usr/lib/{suite.python}/{part}"
            for suite in SUITES
            for part in (
                *(f"config-{suite.python.removeprefix('python')}-{each.triplet}" for each in ARCHITECTURES),
                *("distutils", "ensurepip"),
                *("idlelib", "lib2to3", "pydoc_data", "test", "tkinter", "turtledemo"),
            )
        ),
    }
)

AGENT_DIRECTORY: Final = "usr/lib/agent"

# Our own code, by folder of the checkout; `pyshim` and `guest` are packages, so their __init__ comes along.
AGENT_SOURCES: Final = (
    *("guest/__init__.py", "guest/agent", "guest/forwarder"),
    *("pyshim/__init__.py", "pyshim/cdi", "pyshim/ttrpc", "protos"),
)

# Libraries of the locked virtual environment, by folder of its site-packages. Their extension modules must be of the
# stable ABI ("abi3"): the guest's interpreter is not always the one of the virtual environment.
AGENT_LIBRARIES: Final = ("google/protobuf", "google/_upb")

# Kernel modules that the initrd loads before the root image is mounted, in this order: entropy first, because without
# RDRAND the first reader of random numbers waits for it; then what the console and the root image need.
FIRST_MODULES: Final = ("virtio_pci", "virtio_mmio", "virtio_rng", "virtio_console", "virtio_blk", "erofs")

# Loaded with them when the root image is persistent memory (`root=/dev/pmem0p1`): the bus and the driver.
PMEM_MODULES: Final = ("nfit", "nd_pmem")

# Loaded from the root image, by our agent or before kata-agent starts, in order of urgency: drivers of devices that no
# program opens by name, and file systems that every pod mounts.
LATER_MODULES: Final = (
    *("virtiofs", "overlay", "virtio_net", "vmw_vsock_virtio_transport"),
    *("virtio_scsi", "sd_mod", "virtio_mem", "virtio_balloon"),
)

# In the root image; the kernel calls modprobe for them: file systems by mount, address families by socket, netfilter
# matches and traffic classes by name, algorithms by use.
ON_DEMAND_MODULES: Final = (
    *("vsock_loopback", "virtio_pmem", "loop", "brd", "xfs", "btrfs", "vfat", "isofs", "squashfs", "exfat", "udf"),
    *("dm_mod", "dm_verity", "dm_crypt", "dm_integrity", "dm_thin_pool", "dm_snapshot"),
    *("tun", "veth", "macvlan", "macvtap", "ipvlan", "vxlan", "geneve", "dummy", "ifb", "bonding", "wireguard"),
    *("inet_diag", "unix_diag", "binfmt_misc", "configfs", "autofs4", "vfio_pci"),
    "button",
    *("mlx5_core", "mlx5_ib"),  # network cards that are passed through
)

# The same: all modules in these directories of the kernel's sources. A release of Linux may lack one, or have it under
# another name.
ON_DEMAND_DIRECTORIES: Final = (
    *("net/netfilter", "net/bridge", "net/ipv4", "net/ipv6", "net/sched", "net/xfrm", "net/key"),
    *("net/802", "net/8021q", "net/llc", "net/netlink", "net/packet", "net/unix"),
    *("fs/fuse", "fs/nfs", "fs/nfs_common", "fs/nls", "fs/smb/client", "fs/smb/common", "fs/cifs", "fs/smbfs_common"),
    *("crypto", "arch/x86/crypto", "arch/arm64/crypto"),
    *("drivers/infiniband/core", "drivers/iommu", "drivers/virt/coco"),
)

EMPTY_DIRECTORIES: Final = ("dev", "etc", "mnt", "proc", "root", "run", "sys", "tmp", "var")

# Mounted by the first process once the root image is: see docs/GUEST.md.
FSTAB: Final = """\
proc /proc proc nosuid,nodev,noexec
sys /sys sysfs nosuid,nodev,noexec
cgroup2 /sys/fs/cgroup cgroup2 nosuid,nodev,noexec,nsdelegate
dev /dev devtmpfs nosuid,mode=755
devpts /dev/pts devpts nosuid,noexec,gid=0,mode=620,ptmxmode=666
shm /dev/shm tmpfs nosuid,nodev,mode=1777
run /run tmpfs nosuid,nodev,mode=755
tmp /tmp tmpfs nosuid,nodev,mode=1777
var /var tmpfs nosuid,nodev,mode=755
"""

# In a root image with kata-agent. As process 1 it mounts the kernel's file systems itself, which fails if they are
# mounted already.
KATA_FSTAB: Final = """\
tmp /tmp tmpfs nosuid,nodev,mode=1777
var /var tmpfs nosuid,nodev,mode=755
"""

ETC_FILES: Final = {
    "fstab": FSTAB,
    "group": "root:x:0:\n",
    "hostname": "",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "os-release": 'ID=pyshim-guest\nNAME="pyshim guest"\nPRETTY_NAME="pyshim guest (Debian {release} packages)"\n',
    "passwd": "root:x:0:0:root:/root:/bin/sh\n",
    "resolv.conf": "",
}
