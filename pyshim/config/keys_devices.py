"""Keys of the hypervisor's table: shared directories, disks, network, devices, debugging, the remote VM."""

from typing import Any

from pyshim.config.keys import Dialect, Key, Rows, Table
from pyshim.config.values import (
    BOOL,
    LINK_RATE,
    PATH,
    SECONDS,
    SECTOR_SIZE,
    TEXT,
    WORDS,
    Kind,
    WithoutEffect,
    choice,
    limited,
    memory,
    whole,
)

_H = Rows(table=Table.HYPERVISOR)
_RS = Rows(table=Table.HYPERVISOR, dialect=Dialect.RUST)
_OTHER_VMM = "only other hypervisors have it"
_U32 = (1 << 32) - 1
_MAX_RATE = (1 << 63) - 1
_CHANNEL = choice("auto", "vhost-vsock", "serial", "vhost-user")
_FORMER_CHANNELS = {"true": "vhost-vsock", "false": "serial"}


def _former_channel(value: Any) -> Any:
    """The channel that `use_vsock` asked for in earlier releases of pyshim, with texts; Kata 1 had booleans there."""
    if isinstance(value, bool):
        raise WithoutEffect("was removed from Kata: agent_channel decides how the agent is reached")
    return _CHANNEL.from_toml(_FORMER_CHANNELS.get(value, value) if isinstance(value, str) else value)


SHARE: tuple[Key, ...] = (
    _H.used(
        "shared_fs",
        choice("virtio-fs", "none", refused=("virtio-9p", "virtio-fs-nydus", "inline-virtio-fs")),
        "virtio-fs",
        "How host directories reach the guest: `virtio-fs`, or `none`, which copies them.",
        ann=True,
        blank="",
    ),
    _H.used(
        "virtio_fs_daemon",
        PATH,
        "",
        "virtiofsd, either the Rust program or QEMU's C program. Empty: searched for in the usual places.",
        ann=True,
    ),
    _H.used(
        "virtio_fs_cache",
        choice("", "never", "metadata", "auto", "always"),
        "auto",
        "virtiofsd's cache policy. Empty: its default.",
        ann=True,
    ),
    _H.later(
        "virtio_fs_cache_size",
        memory(0),
        0,
        "Size of the DAX window. 0: none.",
        field="virtio_fs_cache_size_mib",  # Kata's state has it
        ann=True,
    ),
    _RS.later("virtio_fs_is_dax", BOOL, False, "The guest maps files through the DAX window."),
    _H.used("virtio_fs_queue_size", whole(1, 1024), 1024, "Size of virtiofsd's queue, in requests."),
    _H.used(
        "virtio_fs_extra_args",
        WORDS,
        ("--thread-pool-size=1", "--announce-submounts"),
        "Further arguments of virtiofsd.",
        ann=True,
    ),
    _H.used(
        "virtio_fs_xattr",
        BOOL,
        True,
        "true: extended attributes work on shared files, the capabilities of programs among them; false: only where "
        "virtio_fs_extra_args says so.",
        own=True,
    ),
    _H.never("msize_9p", whole(0, _U32), 8192, "Packet size of 9p.", "9p is not supported", ann=True),
    _RS.never(
        "prefetch_list_path",
        PATH,
        "",
        "Files to prefetch.",
        "only nydus uses it",
        also=("config.hypervisor.prefetch_files.list",),
    ),
)

BLOCK: tuple[Key, ...] = (
    _H.used(
        "disable_block_device_use",
        BOOL,
        True,
        "false: a root file system that is a block device or an image file is plugged as a disk; true: it is mounted "
        "on the host and shared. Volumes that are block devices are always plugged.",
        ann=True,
    ),
    _H.used(
        "privileged_host_disks",
        BOOL,
        False,
        "true: a privileged container gets the host's block devices that its spec lists, as disks it can write to. "
        "false: they stay on the host; disks that the container asks for itself are plugged.",
        own=True,
    ),
    _H.used(
        "block_device_driver",
        choice(
            "virtio-scsi",
            "virtio-blk",
            "virtio-blk-pci",
            refused=("virtio-blk-ccw", "virtio-blk-mmio", "virtio-mmio", "virtio-pmem", "nvdimm"),
        ),
        "virtio-scsi",
        "The disk device that a volume becomes; virtio-blk-pci is the same as virtio-blk.",
        ann=True,
        blank="",
    ),
    _H.used(
        "block_device_aio",
        choice("io_uring", "native", "threads"),
        "io_uring",
        "QEMU's interface for asynchronous I/O of disks. `native` needs block_device_cache_direct.",
        ann=True,
        blank="",
    ),
    _H.used("block_device_cache_set", BOOL, False, "false: the next two keys count as false.", ann=True),
    _H.used("block_device_cache_direct", BOOL, False, "Disks bypass the host's page cache.", ann=True),
    _H.used("block_device_cache_noflush", BOOL, False, "QEMU ignores the guest's flushes of disks.", ann=True),
    *(
        _H.used(
            f"block_device_{which}_sector_size",
            SECTOR_SIZE,
            0,
            f"The {which} sector size that disks report; logical is at most physical. 0: QEMU's default.",
            aliases=(f"blk_{which}_sector_size",),
            also=(f"config.hypervisor.blk_{which}_sector_size",),
        )
        for which in ("logical", "physical")
    ),
    _H.used("enable_iothreads", BOOL, False, "The SCSI controller has an I/O thread.", ann=True),
    _H.used("indep_iothreads", whole(0, 50), 0, "Number of I/O threads for hot-plugged virtio-blk disks.", ann=True),
    _RS.never("vm_rootfs_driver", TEXT, "", "Device of the root disk.", "disable_image_nvdimm decides"),
    _RS.used(
        "queue_size",
        whole(1, 1024),
        128,
        "Size of a disk's queue, in requests.",
        also=("config.hypervisor.block_device_queue_size",),
    ),
    _RS.used(
        "num_queues",
        whole(1, 256),
        1,
        "Number of a disk's queues.",
        also=("config.hypervisor.block_device_num_queues",),
    ),
    *(
        _H.never(
            f"{which}_rate_limiter_{what}_{limit}",
            whole(0, _MAX_RATE),
            0,
            f"Limit of {devices}: {limit_text} of {unit_text}.",
            _OTHER_VMM,
        )
        for which, devices in (("disk", "disks"), ("net", "network interfaces"))
        for what, unit_text in (("bw", "bits"), ("ops", "operations"))
        for limit, limit_text in (("max_rate", "rate"), ("one_time_burst", "initial burst"))
    ),
    _H.used(
        "disable_image_nvdimm",
        BOOL,
        False,
        "true: the root image is a virtio disk, as always with microvm; false: it is persistent memory.",
        ann=True,
    ),
)

DEVICES: tuple[Key, ...] = (
    _H.used("default_bridges", limited(5), 1, "Number of PCI bridges for hot-plugged devices.", blank=0),
    _H.used(
        "enable_iommu", BOOL, False, 'The guest has an IOMMU, which `vfio_mode = "vfio"` needs. q35 only.', ann=True
    ),
    _H.later(
        "enable_iommu_platform",
        BOOL,
        False,
        "Virtio devices are behind the guest's IOMMU.",
        "virtio devices reach all of the guest's memory",
        ann=True,
    ),
    _H.used("disable_vhost_net", BOOL, False, "QEMU moves the network's frames, not the kernel's vhost-net.", ann=True),
    _RS.used(
        "network_queues",
        whole(0, 256),
        0,
        "Queue pairs of a network interface. 0: one for each vCPU at the boot. Kata's Rust runtime: 1 by default.",
        ann=True,
    ),
    *(
        _H.used(
            f"{way}_rate_limiter_max_rate",
            LINK_RATE,
            0,
            f"Limit of the traffic that an interface {text}. 0: no limit.",
            ann=True,
        )
        for way, text in (("rx", "receives"), ("tx", "sends"))
    ),
    _H.used(
        "entropy_source",
        PATH,
        "/dev/urandom",
        "The host's file from which the guest's virtio-rng device reads. Empty: no such device.",
        ann=True,
    ),
    _H.used(
        "enable_vhost_user_store",
        BOOL,
        False,
        "Block devices of major number 241 are disks that vhost-user programs such as SPDK serve.",
        ann=True,
    ),
    _H.used(
        "vhost_user_store_path",
        PATH,
        "/var/run/kata-containers/vhost-user",
        "The store of these disks: nodes in block/devices, sockets of the same names in block/sockets.",
        ann=True,
    ),
    _H.used(
        "vhost_user_reconnect_timeout_sec",
        whole(0, 86_400),
        0,
        "Seconds between attempts to reconnect to a vhost-user program that has ended. 0: no attempts.",
        ann=True,
        field="vhost_user_reconnect_timeout_s",
    ),
    _H.used(
        "hot_plug_vfio",
        choice("no-port", "bridge-port", "root-port", "switch-port"),
        "no-port",
        "The kind of port where passed-through devices are plugged into a running VM. `no-port`: they are not.",
        ann=True,
        blank="",
    ),
    _H.used(
        "cold_plug_vfio",
        choice("no-port", "bridge-port", "root-port", "switch-port"),
        "no-port",
        "The kind of port of passed-through devices with which a VM boots. Excludes hot_plug_vfio.",
        ann=True,
        blank="",
    ),
    _H.used(
        "pcie_root_port",
        whole(0, 16),
        0,
        "Number of PCIe root ports for passed-through devices. 0: as many as needed.",
        ann=True,
    ),
    _H.used(
        "pcie_switch_port",
        whole(0, 16),
        0,
        "Number of PCIe switch ports for passed-through devices. 0: as many as needed.",
        ann=True,
    ),
    _H.used(
        "agent_channel",
        _CHANNEL,
        "auto",
        "How the agent is reached: by vhost-vsock; by a virtio-serial port (`serial`); by vhost-vsock if the host has"
        " it, else by a port (`auto`); by a vsock device that a vhost-device-vsock serves, one for each VM"
        " (`vhost-user`).",
        own=True,
        former=("use_vsock", Kind("string", _former_channel, str)),
    ),
    _H.used(
        "vhost_user_vsock_daemon",
        PATH,
        "",
        'vhost-device-vsock, for `agent_channel = "vhost-user"`. Empty: searched for in the usual places.',
        own=True,
    ),
    _H.used(
        "start_timeout",
        SECONDS,
        60.0,
        "Seconds within which QEMU must answer after its start; at least 120 with passed-through devices.",
        own=True,
    ),
)

DEBUG: tuple[Key, ...] = (
    _H.used("enable_debug", BOOL, False, "The guest's kernel and QEMU log more; QEMU has a second monitor socket."),
    _H.used(
        "extra_monitor_socket",
        choice("", "hmp", "qmp", "qmp-pretty"),
        "",
        "A second monitor of QEMU, for operators: `extra-monitor.sock` in the VM's directory. Empty: `hmp` with"
        " enable_debug, else none.",
    ),
    _H.later("hypervisor_loglevel", whole(0, 3), 1, "How much the hypervisor logs."),
    _RS.later("log_level", TEXT, "", "How much the hypervisor logs, as the name of a level."),
)

REMOTE: tuple[Key, ...] = (
    _H.used(
        "remote_hypervisor_socket",
        PATH,
        "/run/peerpod/hypervisor.sock",
        "Socket of the service that makes remote VMs.",
        aliases=("hypervisor_socket",),
    ),
    _H.used(
        "remote_hypervisor_timeout",
        SECONDS,
        600.0,
        "Seconds within which the service must make a remote VM, and start it; for stopping it, at least 600.",
        aliases=("hypervisor_timeout",),
    ),
    _H.used("default_gpus", whole(0, 1024), 0, "Number of GPUs that a remote VM must have.", ann=True),
    _H.used("default_gpu_model", TEXT, "", "The model of these GPUs, as the service names it.", ann=True),
)
