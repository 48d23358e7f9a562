"""Keys of the hypervisor's table: boot files, size, safety, and the annotations that pods may set."""

from fractions import Fraction

from pyshim.config.keys import Dialect, Key, Rows, Table
from pyshim.config.values import (
    BASE_VCPUS,
    BOOL,
    EXTENSIONS,
    GLOBS,
    MAX_MIB,
    PATH,
    PATTERNS,
    TABLE,
    TEXT,
    VCPUS,
    WORDS,
    choice,
    memory,
    whole,
)
from pyshim.model.architecture import MACHINE_TYPES
from pyshim.model.places import SWAP_ROOT

_OTHER_VMM = "only other hypervisors have it"
_NO_FILE = "guest memory is anonymous or in hugepages, not in a file"
_SWAP_AS_ASKED = "a swap disk is made for each container that requests swap"
_PFLASH = "`firmware` is the one image; the variables of UEFI are not kept"
_H = Rows(table=Table.HYPERVISOR)
_RS = Rows(table=Table.HYPERVISOR, dialect=Dialect.RUST)

BOOT: tuple[Key, ...] = (
    _H.used("path", PATH, "", "The QEMU binary. Empty: searched for in the usual places.", ann=True),
    _H.never("jailer_path", PATH, "", "Firecracker's jailer.", _OTHER_VMM, ann=True),
    _H.used("kernel", PATH, "", "The guest's kernel.", ann=True),
    _H.used(
        "kernel_hz",
        whole(0, 10_000),
        0,
        "The timer ticks per second of `kernel` (CONFIG_HZ). 0: not known; each emulated CPU then calibrates its delay"
        " loop when it comes online.",
        own=True,
    ),
    _H.used("image", PATH, "", "The guest's root disk.", ann=True),
    _H.used("initrd", PATH, "", "The guest's initial RAM disk: the whole root, or the loader of `image`.", ann=True),
    _H.used(
        "rootfs_type",
        choice("ext4", "xfs", "erofs", "squashfs"),
        "ext4",
        "The file system of `image`, for root= and rootfstype= of the guest's kernel command line.",
        blank="",
    ),
    _H.used(
        "kernel_params",
        TEXT,
        "",
        "Kernel parameters, after pyshim's. Each replaces those of pyshim with the same name; one of an annotation also"
        " those of the file.",
        ann=True,
    ),
    _H.used(
        "kernel_verity_params",
        TEXT,
        "",
        "dm-verity of the root disk: root_hash, salt, data_blocks, data_block_size, hash_block_size, comma-separated.",
        ann=True,
    ),
    _H.used("firmware", PATH, "", "Firmware image, for -bios or as flash. Empty: QEMU's own.", ann=True),
    _H.later("firmware_volume", PATH, "", "The firmware's variable store.", ann=True),
    _H.used(
        "machine_type",
        choice("", *MACHINE_TYPES),
        "",
        "QEMU's machine: q35; microvm, which has no PCI and no hotplug; virt on arm64. Empty: the node's first.",
        ann=True,
    ),
    _H.used("machine_accelerators", TEXT, "", "Options to add to -machine, comma-separated.", ann=True),
    _H.used("cpu_features", TEXT, "pmu=off", "Options to add to -cpu with KVM, comma-separated.", ann=True),
    _H.used(
        "accelerator",
        choice("auto", "kvm", "tcg"),
        "auto",
        "`auto`: KVM if a test VM runs with it, else emulation, with a warning.",
        own=True,
    ),
    _H.used(
        "cpu_model",
        TEXT,
        "",
        "QEMU's -cpu. Empty: `host` with KVM; with emulation an x86-64-v2 model, on arm64 `max`.",
        own=True,
    ),
    _H.never("pflashes", WORDS, (), "Flash images of the machine.", _PFLASH),
    _H.used(
        "guest_extension_images",
        EXTENSIONS,
        (),
        "Further read-only disks: tables with name, path and optionally verity_params, in the form of"
        " kernel_verity_params. The guest finds a disk by its serial number, `extension-NAME`.",
    ),
    _H.later("use_legacy_serial", BOOL, False, "Console on a serial port instead of a virtio console.", ann=True),
    _H.used(
        "guest_hook_path",
        TEXT,
        "",
        "The directory of OCI hooks in the guest's image, with `prestart`, `poststart` and `poststop` below it.",
        field="guest_hook_path",  # Kata's state has it
        ann=True,
    ),
)

SIZE: tuple[Key, ...] = (
    _H.used(
        "default_vcpus",
        BASE_VCPUS,
        Fraction(1),
        "vCPUs of a VM, to which its pod's are added. Fractions are exact; the sum is rounded up once. More than the"
        " host has: as many as it has; an annotation that asks for more is refused.",
        ann=True,
        blank=0,
    ),
    _H.used(
        "default_maxvcpus",
        whole(0, 4096),
        0,
        "The most vCPUs of a VM; never more than the host has CPUs. 0: as many as the host has CPUs.",
        aliases=("default_max_vcpus",),
        also=("config.hypervisor.default_max_vcpus", "config.hypervisor.default_maxvcpus"),
    ),
    _H.used("default_memory", memory(64), 2048, "Memory of a VM, to which its pod's is added.", ann=True, blank=0),
    _H.used("default_maxmemory", memory(0), 0, "The most memory of a VM; never more than the host's. 0: the host's."),
    _RS.used(
        "overhead_vcpus",
        VCPUS,
        Fraction(1, 5),
        "With sizing_policy `overhead`: vCPUs of the VM itself, added to those of a pod that limits its CPU.",
    ),
    _RS.used(
        "overhead_memory",
        memory(0),
        32,
        "With sizing_policy `overhead`: memory of the VM itself, added to that of a pod that limits its memory.",
    ),
    _H.used(
        "requested_vcpus",
        VCPUS,
        Fraction(0),
        "The CPUs that a pod requests, for container runtimes that pass on less. The admission webhook sets the"
        " annotation.",
        own=True,
        ann=True,
    ),
    _H.used(
        "requested_memory",
        memory(0),
        0,
        "The memory that a pod requests, for container runtimes that pass on less. The admission webhook sets the"
        " annotation.",
        own=True,
        ann=True,
    ),
    _H.used("memory_slots", whole(0, 256), 10, "Slots for hot-plugged memory modules.", ann=True),
    _H.never(
        "memory_offset",
        memory(0),
        0,
        "Address space that is reserved for NVDIMMs.",
        "QEMU chooses their addresses",
        ann=True,
    ),
    _H.used(
        "enable_virtio_mem",
        BOOL,
        False,
        "VMs are resized with virtio-mem, which can also return memory to the host, instead of memory modules.",
        ann=True,
    ),
    _H.used("enable_mem_prealloc", BOOL, False, "All guest memory is allocated before the guest starts.", ann=True),
    _H.used("enable_hugepages", BOOL, False, "Guest memory is in the host's hugepages, preallocated.", ann=True),
    _RS.never("hugepage_type", choice("hugetlbfs", "thp"), "hugetlbfs", "Kind of hugepages.", _OTHER_VMM, ann=True),
    _H.used(
        "reclaim_guest_freed_memory", BOOL, False, "A balloon device returns freed guest pages to the host.", ann=True
    ),
    _H.never("file_mem_backend", PATH, "", "Directory of the file that is guest memory.", _NO_FILE, ann=True),
    _H.never("valid_file_mem_backends", GLOBS, ("",), "Values that annotation `file_mem_backend` may have.", _NO_FILE),
    _H.used(
        "enable_numa",
        BOOL,
        False,
        "The guest has NUMA nodes like the host's if the VM is on several."
        " Needs `static_sandbox_resource_mgmt` on hosts with several nodes.",
    ),
    _H.used(
        "numa_mapping",
        WORDS,
        (),
        "With `enable_numa`: the host nodes of each guest node, such as `0-1`. Empty: as many guest nodes as the VM"
        " needs.",
        ann=True,
    ),
    _H.used("enable_guest_swap", BOOL, False, "A swap disk for each container that requests swap.", ann=True),
    _RS.used("guest_swap_path", PATH, SWAP_ROOT, "Directory of swap files; below /run they take memory."),
    _RS.never(
        "guest_swap_size_percent",
        whole(0, 100_000),
        100,
        "Size of the swap disk in percent of the VM's memory.",
        _SWAP_AS_ASKED,
    ),
    _RS.never(
        "guest_swap_create_threshold_secs", whole(0, 86_400), 60, "Seconds until a swap disk is made.", _SWAP_AS_ASKED
    ),
    _H.used(
        "guest_memory_dump_path",
        PATH,
        "",
        "Directory for dumps of guest memory, `<sandbox>/vmcore-<time>.elf`. One is written when the guest's kernel"
        " panics, if it has the pvpanic driver and the directory has room. Empty: no dump.",
    ),
    _H.used("guest_memory_dump_paging", BOOL, False, "The dump has the guest's virtual addresses, for debuggers."),
)

SAFETY: tuple[Key, ...] = (
    _H.used(
        "confidential_guest",
        BOOL,
        False,
        "The host cannot read the guest's memory. No sandbox starts on a host without such a technology.",
    ),
    _H.used("sev_snp_guest", BOOL, False, "With confidential_guest on AMD's processors: SNP instead of SEV."),
    _H.used(
        "confidential_technology",
        choice("auto", "tdx", "snp", "sev"),
        "auto",
        "With confidential_guest: the technology. `auto`: SNP with sev_snp_guest, else TDX or SEV, as the host offers.",
        own=True,
    ),
    _H.used("snp_guest_policy", whole(0, (1 << 64) - 1), 0x30000, "The bits of the SNP guest policy."),
    _H.used(
        "sev_guest_policy",
        whole(0, (1 << 32) - 1),
        0,
        "The bits of the SEV guest policy; bit 2 demands SEV-ES. 0: no debugging, and SEV-ES if the host has it.",
        own=True,
    ),
    _H.used(
        "sev_launch_hook",
        PATH,
        "",
        "With SEV: a program that checks the launch measurement and may return a secret for the guest.",
        own=True,
    ),
    _H.used("snp_id_block", TEXT, "", "SNP identity block, base64."),
    _H.used("snp_id_auth", TEXT, "", "SNP identity authentication, base64."),
    _H.never(
        "measurement_algo",
        choice("sha256", "sha384", "sha512"),
        "sha512",
        "Digest of initdata.",
        "the document itself names its digest",
    ),
    _H.used(
        "tdx_quote_generation_service_socket_port",
        whole(0, MAX_MIB - 1),
        0,
        "vsock port of the host's quote service. 0: its unix socket if there is one, else port 4050.",
    ),
    _RS.used(
        "initdata",
        TEXT,
        "",
        "A document for the guest, which reads it from a disk: TOML, or base64 of its gzip. Its digest is part of a"
        " confidential guest's measurement.",
        also=("config.hypervisor.cc_init_data",),
    ),
    _H.used(
        "seccompsandbox",
        TEXT,
        "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
        "The text of QEMU's -sandbox, its seccomp filter. Empty: no filter, which is Kata's default.",
        aliases=("seccomp_sandbox",),
    ),
    _H.used(
        "privileged_vmm",
        BOOL,
        False,
        "true: QEMU and vhost-device-vsock run as root, with all capabilities, and see the host's files. false: they"
        " lose all capabilities for good; a QEMU that runs as root keeps those to open files of any owner and to lock"
        " memory.",
        own=True,
    ),
    _H.used(
        "enable_core_dumps",
        BOOL,
        False,
        "true: a crash of QEMU, virtiofsd or vhost-device-vsock writes a core file, which contains guest memory, if the"
        " shim's RLIMIT_CORE and the host's core_pattern provide for one. false: no core files.",
        own=True,
    ),
    _H.never("disable_seccomp", BOOL, False, "No seccomp filter for the VMM.", "with QEMU, seccompsandbox decides"),
    _H.used(
        "rootless",
        BOOL,
        True,
        "QEMU and vhost-device-vsock run as unprivileged users, two for each sandbox. QEMU stays root, with a warning"
        " in the log, with a confidential guest, VFIO devices or vhost_user_reconnect_timeout_sec, and if the user"
        " could not open a file that QEMU needs.",
        ann=True,
    ),
    _H.used(
        "rootless_first_id",
        whole(1, 2**32 - 2 - 65536),
        1879048192,
        "With `rootless`: the first of 65536 user ids, which are used as group ids, too. Nothing else on the host may"
        " use them.",
        own=True,
    ),
    _RS.never("rootless_user", TABLE, {}, "The user of `rootless`.", "each sandbox has a user of its own"),
    _H.used(
        "disable_selinux",
        BOOL,
        False,
        "true: QEMU, virtiofsd and vhost-device-vsock get no SELinux label. false: they get the label of the pod's spec"
        " with the type selinux_vmm_type.",
    ),
    _H.used(
        "selinux_vmm_type",
        TEXT,
        "container_kvm_t",
        "The SELinux type of QEMU, virtiofsd and vhost-device-vsock. container-selinux defines the default.",
        own=True,
    ),
    _H.used(
        "apparmor_profile",
        TEXT,
        "",
        "A loaded AppArmor profile of the host, for QEMU, virtiofsd and vhost-device-vsock. Empty: none.",
        own=True,
    ),
    _H.refused("disable_guest_selinux", BOOL, True, "false: SELinux inside the guest."),
    _H.used(
        "disable_nesting_checks",
        BOOL,
        False,
        "On a host that is itself a VM, with KVM: true: modern virtio devices; false: legacy ones.",
    ),
    _RS.never("disable_nested_virtualization", BOOL, False, "Hide virtualization from the guest.", _OTHER_VMM),
)

PERMISSIONS: tuple[Key, ...] = (
    _H.used(
        "enable_annotations",
        PATTERNS,
        (),
        "The annotations io.katacontainers.config.hypervisor.NAME that a pod may set, as expressions for NAME.",
        field="",
    ),
    _H.used(
        "annotation_match",
        choice("search", "anchored"),
        "search",
        "`search`: an expression of enable_annotations matches a part of NAME, as in Kata. `anchored`: all of NAME.",
        own=True,
        field="",
    ),
    *(
        _H.used(name, GLOBS, default, f"Paths that annotation `{about}` may set, besides the file's own.", field="")
        for name, about, default in (
            ("valid_hypervisor_paths", "path", ()),
            ("valid_jailer_paths", "jailer_path", ()),
            ("valid_virtio_fs_daemon_paths", "virtio_fs_daemon", ()),
            ("valid_vhost_user_store_paths", "vhost_user_store_path", ()),
            ("valid_entropy_sources", "entropy_source", ("/dev/urandom", "/dev/random", "")),
        )
    ),
    *(
        _H.used(
            f"valid_{name}_paths",
            GLOBS,
            (),
            f"Paths that annotation `{name}` may set, if enable_annotations permits it. Empty: any, as in Kata.",
            own=True,
            field="",
        )
        for name in ("kernel", "image", "initrd", "firmware")
    ),
    _RS.never("ctlpath", PATH, "", "Control program of the hypervisor.", _OTHER_VMM),
    _RS.never("valid_ctlpaths", GLOBS, (), "Paths that annotation `ctlpath` may set.", _OTHER_VMM),
)
