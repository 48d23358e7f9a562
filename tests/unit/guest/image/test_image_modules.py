"""The kernel modules that a build takes; the guest drives every device its VMM can give it."""

import json
import re
from pathlib import Path

import pytest

from guest.image import modules, recipe
from guest.image.errors import BuildError
from guest.image.modules import ModuleStore, module_name, parse_dependencies

CHECKOUT = Path(__file__).resolve().parents[4]
AMD64 = recipe.ARCHITECTURES[0]

# The module that drives a device, by QEMU's name of the device without its bus.
DRIVERS = {
    "nvdimm": "nd_pmem",
    "pvpanic": "pvpanic_mmio",
    "scsi-hd": "sd_mod",
    "vhost-user-blk": "virtio_blk",
    "vhost-user-fs": "virtiofs",
    "vhost-user-vsock": "vmw_vsock_virtio_transport",
    "vhost-vsock": "vmw_vsock_virtio_transport",
    "virtconsole": "virtio_console",
    "virtio-balloon": "virtio_balloon",
    "virtio-blk": "virtio_blk",
    "virtio-mem": "virtio_mem",
    "virtio-net": "virtio_net",
    "virtio-rng": "virtio_rng",
    "virtio-scsi": "virtio_scsi",
    "virtio-serial": "virtio_console",
    "virtserialport": "virtio_console",
}
# The number of each virtio device: virtio 1.2, section 5.
VIRTIO_NUMBERS = {
    "vhost-user-blk": 2,
    "vhost-user-fs": 26,
    "vhost-user-vsock": 19,
    "vhost-vsock": 19,
    "virtio-balloon": 5,
    "virtio-blk": 2,
    "virtio-mem": 24,
    "virtio-net": 1,
    "virtio-rng": 4,
    "virtio-scsi": 8,
    "virtio-serial": 3,
}
# Driven by what is built into the kernel.
BUILT_IN = {"pci-bridge", "pcie-pci-bridge", "pcie-root-port", "x3130-upstream", "xio3130-downstream"}
# Built into the kernel of Debian 13. That of Debian 12 has no driver: its guests are reseeded by their agent alone.
NOT_DRIVEN = {"vmgenid"}
# Driven by what the image's owner puts into it: a device of the host's.
PASSED_THROUGH = {"vfio-pci"}

DEPMOD = """\
kernel/a/virtio-rng.ko: kernel/b/virtio.ko kernel/b/virtio_ring.ko
kernel/b/virtio.ko: kernel/b/virtio_ring.ko
kernel/b/virtio_ring.ko:
alias virtio:d00000004v* virtio_rng
"""


def emitted() -> set[str]:
    """QEMU's names, without the bus, of the devices in the driver's sources and in the command lines it writes."""
    sources = "\n".join(file.read_text() for file in (CHECKOUT / "hypervisors/qemu").rglob("*.py"))
    found = set(re.findall(r'"(virtio-[a-z]+|vhost-[a-z-]+?|nvdimm)(?:-pci|-device)?[,"]', sources))
    for file in (CHECKOUT / "tests/golden/qemu").rglob("*.txt"):
        options = re.findall(r"^-device ([a-z0-9-]+)", file.read_text(), re.MULTILINE)
        found |= {name if name in PASSED_THROUGH else re.sub("-(pci|device)$", "", name) for name in options}
    others = {"vhost-user", "virtio-mmio", "vhost-started"}  # a network's back end, a bus, a word of an answer
    return found - others - BUILT_IN - NOT_DRIVEN - PASSED_THROUGH


def test_every_device_of_the_qemu_driver_has_its_kernel_module_loaded_at_boot() -> None:
    loaded = {*recipe.FIRST_MODULES, *recipe.PMEM_MODULES, *recipe.LATER_MODULES, *AMD64.later_modules}
    devices = emitted()

    assert {"virtio-net", "vhost-vsock", "vhost-user-fs", "virtio-mem", "nvdimm"} <= devices
    assert [device for device in sorted(devices) if DRIVERS.get(device) not in loaded] == []


@pytest.mark.skipif(not (CHECKOUT / ".build/guest/manifest.json").exists(), reason="needs `make guest`")
def test_the_kernel_drives_each_virtio_device_by_the_module_that_is_loaded_for_it() -> None:
    release = json.loads((CHECKOUT / ".build/guest/manifest.json").read_text())["kernel_release"]
    packages = (CHECKOUT / ".build/cache/guest/unpacked").glob(f"linux-image-{release}_*")
    base = modules.module_base(max(packages, key=lambda package: package.stat().st_mtime_ns))
    lines = modules.run(["busybox", "depmod", "-n", "-b", base, release]).splitlines()
    module_of = dict(line.split()[1:3] for line in lines if line.startswith("alias "))
    built_in = {module_name(line) for line in (base / f"lib/modules/{release}/modules.builtin").read_text().split()}
    devices = {
        device for device in emitted() if device.startswith(("virtio-", "vhost-")) and DRIVERS[device] not in built_in
    }

    drivers = {device: module_of[f"virtio:d{VIRTIO_NUMBERS[device]:08X}v*"].replace("-", "_") for device in devices}
    assert "virtio-net" in devices
    assert drivers == {device: DRIVERS[device] for device in devices}


# -- features beside Kata's --------------------------------------------------------------------------------------------

FEATURES = CHECKOUT / "tests/golden/guest/kata_features.txt"

# Options of Kata's guest kernel that Debian's cloud kernels, 6.1 and 6.12, do not set.
LEFT_OUT = {
    "of other releases of Linux: gone or renamed before 6.1, or newer than 6.12": (
        "CRC_OPTIMIZATIONS CRYPTO_SELFTESTS HAVE_NET_DSA ISA_DMA_API MEMCG_SWAP MEMCG_SWAP_ENABLED "
        "NETFILTER_XTABLES_LEGACY NF_LOG_COMMON NF_NAT_IPV4 NF_NAT_NEEDED NF_NAT_PROTO_DCCP NF_NAT_PROTO_GRE "
        "NF_NAT_PROTO_SCTP NF_NAT_PROTO_UDPLITE NO_HZ SPECULATION_MITIGATIONS"
    ),
    "files are shared by virtio-fs": "9P_FS 9P_FS_POSIX_ACL 9P_FS_SECURITY NET_9P NET_9P_VIRTIO",
    "a default that our first process, agent or a mount option sets, or that Debian has otherwise": (
        "CPU_FREQ_DEFAULT_GOV_PERFORMANCE DEFAULT_BBR DEVTMPFS_MOUNT MEMORY_HOTPLUG_DEFAULT_ONLINE OVERLAY_FS_INDEX "
        "OVERLAY_FS_METACOPY OVERLAY_FS_REDIRECT_DIR OVERLAY_FS_XINO_AUTO PSI_DEFAULT_DISABLED"
    ),
    "how Kata builds its kernel and looks into it": (
        "DEBUG_MEMORY_INIT MODULE_SIG_ALL MODULE_SIG_FORCE MODULE_SIG_SHA512 SECURITY_SELINUX_BOOTPARAM "
        "X86_VERBOSE_BOOTUP"
    ),
    "the guest boots without it: an initrd mounts the root, ACPI describes the machine": (
        "DM_INIT HOTPLUG_PCI_SHPC IP_PNP IP_PNP_DHCP VIRTIO_MMIO_CMDLINE_DEVICES X86_MPPARSE"
    ),
    "of hardware that no VM of ours has, or of other processors": (
        "NET_SWITCHDEV NVMEM OF X86_PLATFORM_DEVICES XZ_DEC_ARM XZ_DEC_ARMTHUMB XZ_DEC_POWERPC XZ_DEC_SPARC"
    ),
    "Debian leaves it out: programs of 16 bits, and a witness service of SMB clusters": (
        "CIFS_SWN_UPCALL X86_16BIT X86_ESPFIX64"
    ),
}
# Of one of the two kernels only: gone since 6.1, or newer than it.
LEFT_OUT_OF = {
    "6.12.": "GENERIC_MSI_IRQ_DOMAIN PAGE_TABLE_ISOLATION PCI_MSI_IRQ_DOMAIN RETPOLINE",
    "6.1.": (
        "BLK_DEV_WRITE_MOUNTED CACHESTAT_SYSCALL INTEL_TDX_GUEST IP6_NF_IPTABLES_LEGACY IP_NF_IPTABLES_LEGACY "
        "MHP_DEFAULT_ONLINE_TYPE_ONLINE_AUTO MITIGATION_PAGE_TABLE_ISOLATION MITIGATION_RETPOLINE SEV_GUEST "
        "TDX_GUEST_DRIVER VIRTIO_IOMMU VIRT_DRIVERS XZ_DEC_ARM64 XZ_DEC_RISCV"
    ),
}


@pytest.mark.parametrize("version", LEFT_OUT_OF)
def test_the_image_has_every_feature_of_katas_kernel_but_those_left_out_with_a_reason(version: str) -> None:
    packages = list((CHECKOUT / ".build/cache/guest/unpacked").glob(f"linux-image-{version}*-amd64_*"))
    if not packages:
        pytest.skip(
            f"no kernel {version} in .build/cache/guest/unpacked: run make guest, GUEST='--suite bookworm' for 6.1"
        )
    kernel = max(packages, key=lambda package: package.stat().st_mtime_ns)
    (release,) = (path.name.removeprefix("config-") for path in (kernel / "boot").glob("config-*"))
    lines = (kernel / f"boot/config-{release}").read_text().splitlines()
    settings = dict(line.removeprefix("CONFIG_").split("=", 1) for line in lines if line.startswith("CONFIG_"))
    store = ModuleStore(kernel, release, busybox=Path("busybox"))
    names = (*recipe.FIRST_MODULES, *recipe.PMEM_MODULES, *recipe.LATER_MODULES, *recipe.ON_DEMAND_MODULES)
    names += (*AMD64.later_modules, *AMD64.on_demand_modules)
    taken = {module_name(path) for path in store.paths((*names, *store.below(recipe.ON_DEMAND_DIRECTORIES)))}
    features = {
        name: modules
        for name, *modules in map(str.split, FEATURES.read_text().splitlines())
        if not name.startswith("#")
    }

    as_modules = {name: store.loadable(found) for name, found in features.items() if settings.get(name) == "m"}
    lacking = {name: sorted(set(found) - taken) for name, found in as_modules.items() if set(found) - taken}
    assert lacking == {}
    assert {name for name in as_modules if not features[name]} == {"CRYPTO_AEAD"}  # has no module of its own
    assert len(features) > 600
    left_out = [name for text in (*LEFT_OUT.values(), LEFT_OUT_OF[version]) for name in text.split()]
    assert sorted(name for name in features if name not in settings) == sorted(left_out)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleStore:
    monkeypatch.setattr(modules, "run", lambda argv: DEPMOD)
    directory = tmp_path / "lib/modules/6.1"
    for name in ("a/virtio-rng", "b/virtio", "b/virtio_ring"):
        (directory / f"kernel/{name}.ko").parent.mkdir(parents=True, exist_ok=True)
        (directory / f"kernel/{name}.ko").write_text(name)
    (directory / "modules.builtin").write_text("kernel/lib/crc16.ko\n")
    return ModuleStore(tmp_path, "6.1", busybox=Path("busybox"))


def test_a_module_comes_with_all_it_needs_and_built_in_ones_are_left_out(store: ModuleStore) -> None:
    assert store.paths(["virtio_rng", "crc16"]) == [
        "kernel/a/virtio-rng.ko",
        "kernel/b/virtio.ko",
        "kernel/b/virtio_ring.ko",
    ]


def test_a_module_the_kernel_package_lacks_is_named(store: ModuleStore) -> None:
    with pytest.raises(BuildError, match="find kernel module absent: not in"):
        store.paths(["virtio", "absent"])


def test_modules_are_copied_with_their_folders(store: ModuleStore, tmp_path: Path) -> None:
    store.install(tmp_path / "root", ["virtio"])

    files = {path.relative_to(tmp_path / "root").as_posix() for path in (tmp_path / "root").rglob("*.ko")}
    assert files == {f"lib/modules/6.1/kernel/b/{name}.ko" for name in ("virtio", "virtio_ring")}


def test_module_names_have_underscores() -> None:
    assert module_name("kernel/drivers/virtio-rng.ko") == "virtio_rng"
    assert parse_dependencies(DEPMOD).keys() == {"virtio_rng", "virtio", "virtio_ring"}
