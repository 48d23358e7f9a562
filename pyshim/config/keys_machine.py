"""Keys of the hypervisor's table: what is booted, its size, its safety, what a pod may choose of it."""

from fractions import Fraction

from pyshim.config.keys import Dialect, Key, Rows, Table
from pyshim.config.values import (
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

_OTHER_VMM = "only other hypervisors have it"
_NO_FILE = "guest memory is always shared, anonymously or from hugepages"
_SWAP_AS_ASKED = "swap disks are made as containers ask for them"
_ARM = "only arm64 guests need it"
_H = Rows(table=Table.HYPERVISOR)
_RS = Rows(table=Table.HYPERVISOR, dialect=Dialect.RUST)

BOOT: tuple[Key, ...] = (
    _H.used("path", PATH, "", "The QEMU binary. Empty: looked for in the usual places.", ann=True),
    _H.never("jailer_path", PATH, "", "Firecracker's jailer.", _OTHER_VMM, ann=True),
    _H.used("kernel", PATH, "", "The guest's kernel.", ann=True),
    _H.used(
        "kernel_hz",
        whole(0, 10_000),
        0,
        "Timer ticks a second that `kernel` was built with (CONFIG_HZ). 0: not known; then emulated CPUs measure their"
        " delay loops as they come online.",
        own=True,
    ),
    _H.used("image", PATH, "", "The guest's root disk.", ann=True),
    _H.used("initrd", PATH, "", "The guest's initial RAM disk: its whole root, or the loader of `image`.", ann=True),
    _H.used(
        "rootfs_type",
        choice("ext4", "xfs", "erofs", "squashfs"),
        "ext4",
        "File system of `image`: becomes root= and rootfstype= of the guest's kernel line.",
    ),
    _H.used(
        "kernel_params",
        TEXT,
        "",
        "Kernel parameters, put last. One replaces pyshim's of the same name; an annotation's replaces the file's.",
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
        "machine_type", choice("q35", "microvm"), "q35", "QEMU's machine; microvm has no PCI and no hotplug.", ann=True
    ),
    _H.used("machine_accelerators", TEXT, "", "Options added to -machine, with commas between.", ann=True),
    _H.used("cpu_features", TEXT, "pmu=off", "Options added to -cpu with KVM, with commas between.", ann=True),
    _H.used(
        "accelerator",
        choice("auto", "kvm", "tcg"),
        "auto",
        "`auto`: KVM where a test VM shows that it works, else emulation with a warning.",
        own=True,
    ),
    _H.used("cpu_model", TEXT, "", "QEMU's -cpu. Empty: `host` with KVM, an x86-64-v2 model with emulation.", own=True),
    _H.never("pflashes", WORDS, (), "Flash images of the machine.", _ARM),
    _H.used(
        "guest_extension_images",
        EXTENSIONS,
        (),
        "Further read-only disks, which the guest finds by the serial number `extension-NAME`: tables with name, path"
        " and verity_params, which is written like kernel_verity_params or empty.",
    ),
    _H.later("use_legacy_serial", BOOL, False, "Console on a serial port instead of a virtio console.", ann=True),
    _H.used(
        "guest_hook_path",
        TEXT,
        "",
        "The directory in the guest's image that holds OCI hooks, in `prestart`, `poststart` and `poststop`.",
        field="guest_hook_path",  # Kata's state has it
        ann=True,
    ),
)

SIZE: tuple[Key, ...] = (
    _H.used(
        "default_vcpus",
        VCPUS,
        Fraction(1),
        "vCPUs of a VM before its pod's own are added. Fractions are exact; the sum is rounded up once.",
        ann=True,
    ),
    _H.used(
        "default_maxvcpus",
        whole(0, 4096),
        0,
        "Largest number of vCPUs of a VM, at most the host's CPUs. 0: the host's CPUs.",
        aliases=("default_max_vcpus",),
        also=("config.hypervisor.default_max_vcpus", "config.hypervisor.default_maxvcpus"),
    ),
    _H.used("default_memory", memory(64), 2048, "Memory of a VM before its pod's own is added.", ann=True),
    _H.used("default_maxmemory", memory(0), 0, "Largest memory of a VM, at most the host's. 0: the host's."),
    _RS.used(
        "overhead_vcpus",
        VCPUS,
        Fraction(1, 5),
        "Sizing policy `overhead`: vCPUs added to those of a pod that limits its CPU.",
    ),
    _RS.used(
        "overhead_memory",
        memory(0),
        32,
        "Sizing policy `overhead`: memory added to that of a pod that limits its memory.",
    ),
    _H.used(
        "requested_vcpus",
        VCPUS,
        Fraction(0),
        "CPUs a pod asks for, where its runtime passes on less. The admission webhook writes it as an annotation.",
        own=True,
        ann=True,
    ),
    _H.used(
        "requested_memory",
        memory(0),
        0,
        "Memory a pod asks for, where its runtime passes on less. The admission webhook writes it as an annotation.",
        own=True,
        ann=True,
    ),
    _H.used("memory_slots", whole(0, 256), 10, "Slots for memory modules added later.", ann=True),
    _H.never(
        "memory_offset",
        memory(0),
        0,
        "Room kept for NVDIMMs in the guest's address space.",
        "QEMU finds its own place",
        ann=True,
    ),
    _H.used(
        "enable_virtio_mem",
        BOOL,
        False,
        "VMs are resized with virtio-mem instead of memory modules, so that the host gets memory back, too.",
        ann=True,
    ),
    _H.used("enable_mem_prealloc", BOOL, False, "Touch all of the guest's memory before it starts.", ann=True),
    _H.used("enable_hugepages", BOOL, False, "Guest memory from the host's hugepages, preallocated.", ann=True),
    _RS.never("hugepage_type", choice("hugetlbfs", "thp"), "hugetlbfs", "Kind of hugepages.", _OTHER_VMM, ann=True),
    _H.used(
        "reclaim_guest_freed_memory", BOOL, False, "Balloon that gives freed guest pages back to the host.", ann=True
    ),
    _H.never("file_mem_backend", PATH, "", "Directory behind the guest's memory.", _NO_FILE, ann=True),
    _H.never("valid_file_mem_backends", GLOBS, ("",), "What annotation `file_mem_backend` may name.", _NO_FILE),
    _H.used(
        "enable_numa",
        BOOL,
        False,
        "NUMA nodes in the guest, as on the host, where the VM is on several."
        " Needs `static_sandbox_resource_mgmt` on hosts with several nodes.",
    ),
    _H.used(
        "numa_mapping",
        WORDS,
        (),
        "Host nodes of each guest node, such as `0-1`, with `enable_numa`; empty: as many as the VM needs.",
        ann=True,
    ),
    _H.used("enable_guest_swap", BOOL, False, "A swap disk for containers that ask for one.", ann=True),
    _RS.used(
        "guest_swap_path", PATH, "/run/kata-containers/swap", "Directory of swap files; below /run they are memory."
    ),
    _RS.never(
        "guest_swap_size_percent",
        whole(0, 100_000),
        100,
        "Size of the swap disk in percent of the VM's memory.",
        _SWAP_AS_ASKED,
    ),
    _RS.never(
        "guest_swap_create_threshold_secs", whole(0, 86_400), 60, "Seconds before a swap disk is made.", _SWAP_AS_ASKED
    ),
    _H.used(
        "guest_memory_dump_path",
        PATH,
        "",
        "Directory for the guest's memory when its kernel panics, as `<sandbox>/vmcore-<time>.elf`, if it has room."
        " The guest's kernel needs its pvpanic driver. Empty: no dump.",
    ),
    _H.used(
        "guest_memory_dump_paging", BOOL, False, "Dump with guest paging, so that debuggers find virtual addresses."
    ),
)

SAFETY: tuple[Key, ...] = (
    _H.used(
        "confidential_guest",
        BOOL,
        False,
        "A guest whose memory the host cannot read; an error on a host that offers none.",
    ),
    _H.used("sev_snp_guest", BOOL, False, "With confidential_guest on AMD: SNP instead of SEV."),
    _H.used(
        "confidential_technology",
        choice("auto", "tdx", "snp", "sev"),
        "auto",
        "With confidential_guest: which one. `auto`: SNP with sev_snp_guest, else the host's, TDX or SEV.",
        own=True,
    ),
    _H.used("snp_guest_policy", whole(0, (1 << 64) - 1), 0x30000, "The SNP guest policy's bits."),
    _H.used(
        "sev_guest_policy",
        whole(0, (1 << 32) - 1),
        0,
        "The SEV guest policy's bits; bit 2 asks for SEV-ES. 0: no debugging, and SEV-ES where the host has it.",
        own=True,
    ),
    _H.used(
        "sev_launch_hook",
        PATH,
        "",
        "With SEV: a program that gets the launch measurement and may answer with a secret for the guest.",
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
        "vsock port of the host's quote service. 0: its unix socket where there is one, else port 4050.",
    ),
    _RS.used(
        "initdata",
        TEXT,
        "",
        "The document measured into a confidential guest, which gets it as a disk: TOML, or base64 of its gzip.",
        also=("config.hypervisor.cc_init_data",),
    ),
    _H.used(
        "seccompsandbox",
        TEXT,
        "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
        "QEMU's own seccomp filter: the text of -sandbox. Empty: none, which is Kata's default.",
        aliases=("seccomp_sandbox",),
    ),
    _H.used(
        "privileged_vmm",
        BOOL,
        False,
        "QEMU and vhost-device-vsock keep the capabilities of root, stay root and see the host's files. Otherwise they"
        " lose all, for good, but the two that a QEMU of root needs: to open files of any owner, and to lock memory.",
        own=True,
    ),
    _H.used(
        "enable_core_dumps",
        BOOL,
        False,
        "A crash of QEMU, virtiofsd or vhost-device-vsock may write a core as the shim's RLIMIT_CORE and the host's"
        " core_pattern say, with the guest's memory in it. Otherwise they write none.",
        own=True,
    ),
    _H.never("disable_seccomp", BOOL, False, "No seccomp filter for the VMM.", "with QEMU, seccompsandbox decides"),
    _H.used(
        "rootless",
        BOOL,
        True,
        "QEMU and vhost-device-vsock run as users without privileges, two for each sandbox. QEMU stays root, with a"
        " warning in the log, for confidential guests, VFIO devices, vhost_user_reconnect_timeout_sec and when it"
        " could not open a file.",
        ann=True,
    ),
    _H.used(
        "rootless_first_id",
        whole(1, 2**32 - 2 - 65536),
        1879048192,
        "With `rootless`: the first of 65536 user ids, which are group ids too, that nothing else on the host has.",
        own=True,
    ),
    _RS.never("rootless_user", TABLE, {}, "The user of `rootless`.", "each sandbox has a user of its own"),
    _H.used(
        "disable_selinux",
        BOOL,
        False,
        "No SELinux label for QEMU, virtiofsd and vhost-device-vsock. Otherwise they have that of the pod's spec, with"
        " its categories, and the type selinux_vmm_type.",
    ),
    _H.used(
        "selinux_vmm_type",
        TEXT,
        "container_kvm_t",
        "The SELinux type of what serves a guest; container-selinux has the default.",
        own=True,
    ),
    _H.used(
        "apparmor_profile",
        TEXT,
        "",
        "An AppArmor profile that the host has loaded, for QEMU, virtiofsd and vhost-device-vsock. Empty: none.",
        own=True,
    ),
    _H.refused("disable_guest_selinux", BOOL, True, "false: SELinux inside the guest."),
    _H.used(
        "disable_nesting_checks",
        BOOL,
        False,
        "true: modern virtio devices also with KVM on a host that is itself a VM; false: legacy ones there.",
    ),
    _RS.never("disable_nested_virtualization", BOOL, False, "Hide virtualization from the guest.", _OTHER_VMM),
)

PERMISSIONS: tuple[Key, ...] = (
    _H.used(
        "enable_annotations",
        PATTERNS,
        (),
        "Which annotations io.katacontainers.config.hypervisor.NAME a pod may set: expressions for NAME.",
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
        _H.used(name, GLOBS, default, f"What annotation `{about}` may name, beside the file's own value.", field="")
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
            f"What annotation `{name}` may name. Empty: any file, as in Kata, once enable_annotations allows it.",
            own=True,
            field="",
        )
        for name in ("kernel", "image", "initrd", "firmware")
    ),
    _RS.never("ctlpath", PATH, "", "Control program of the hypervisor.", _OTHER_VMM),
    _RS.never("valid_ctlpaths", GLOBS, (), "What annotation `ctlpath` may name.", _OTHER_VMM),
)
