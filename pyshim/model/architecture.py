"""What depends on the processor: one value for each architecture, and one for each machine type of QEMU.

The machine type of a VM names its architecture, so an aarch64 VM can be emulated on an x86-64 host. Import-light, for
`host/syscalls.py`. Sources: QEMU's docs/system/arm/virt.rst and hw/arm/virt.c; Kata's Go runtime (qemu_arm64.go, the
createPCIeTopology of qemu.go), which plugs devices of an aarch64 VM into PCIe ports, too.
"""

from collections.abc import Mapping
from typing import NamedTuple


class SystemCalls(NamedTuple):
    """The numbers below 424, from which on all architectures have the same ones."""

    setgroups: int
    setresuid: int
    setresgid: int
    seccomp: int
    bpf: int


class Architecture(NamedTuple):
    name: str
    """The kernel's, as `uname -m` says it."""
    debian: str
    """Debian's name, and that of OCI images."""
    qemu_paths: tuple[str, ...]
    """Where QEMU is searched for: the places of Debian, kata-deploy and Fedora."""
    kernel_magic: tuple[int, bytes]
    """Offset and content of a mark in the header of a bootable kernel."""
    elf_machine: int
    """`e_machine` of its programs. Source: linux/elf-em.h."""
    system_calls: SystemCalls
    seccomp_family: tuple[int, ...]
    """AUDIT_ARCH of this architecture, and of others whose programs its kernel runs. Source: linux/audit.h."""
    virtualisation_flags: frozenset[str]
    """CPU flags of which /proc/cpuinfo shows one if the CPU has virtualisation; empty: it shows none, and the device
    decides."""
    kvm_advice: str
    """What a node without KVM needs."""
    kernel_params: tuple[str, ...]
    """What Kata's Go runtime gives every guest of this architecture."""
    early_console: str
    """The kernel parameter for messages on the serial port before the virtio console has its driver."""
    iommu_params: tuple[str, ...]
    emulated_cpu: str
    """QEMU's -cpu without KVM."""
    maps_pmem: bool
    """A root on persistent memory is mounted with `dax`. Kata's arm64 kernels panicked with it."""
    measures_clock: bool
    """Its CPUs measure their time stamp counter and their delay loop at boot, unless the command line has the rates."""


class MachineType(NamedTuple):
    name: str
    architecture: Architecture
    is_pci: bool
    """Virtio devices are on PCI; else they are memory-mapped, and the machine has no hotplug at all."""
    has_acpi_bridges: bool
    """ACPI plugs devices behind a PCI bridge; else a switch has a PCIe port for each device, by native hotplug."""
    bridge_slots: int
    """The most devices behind one such bridge or switch."""
    plugs_vcpus: bool
    needs_uefi_for_acpi: bool
    """Only with firmware does the guest find ACPI, by which DIMMs are plugged and persistent memory is found."""
    has_iommu: bool
    can_be_saved: bool
    """A VM can continue from a template."""
    refuses_confidential: str
    """Why no confidential guest runs on it; empty: one can."""
    properties: Mapping[str, str | bool]
    """Properties of -machine. Those that are off leave out devices that the machine has otherwise: no guest of ours
    uses them, and each is code of QEMU that a guest can attack. Source: QEMU's hw/i386/pc.c, pc_machine_class_init."""
    options: tuple[str, ...]
    """Further words of the argv."""
    own_firmware: str
    """Where the configuration names none: a file of QEMU's. Empty: QEMU chooses."""
    panic_device: str
    """By which a kernel reports its panic; empty: none."""

    def place_behind(self, bridge: int, slot: int) -> tuple[str, int]:
        """(id of the bus, slot on it) of the device at this slot, counted from 1, of a bridge or switch."""
        if self.has_acpi_bridges:
            return f"pci-bridge-{bridge}", slot
        return f"pci-bridge-{bridge}-{slot}", 0


X86_64 = Architecture(
    name="x86_64",
    debian="amd64",
    qemu_paths=("/usr/bin/qemu-system-x86_64", "/opt/kata/bin/qemu-system-x86_64", "/usr/libexec/qemu-kvm"),
    kernel_magic=(0x202, b"HdrS"),  # Documentation/arch/x86/boot.rst
    elf_machine=62,
    system_calls=SystemCalls(setgroups=116, setresuid=117, setresgid=119, seccomp=317, bpf=321),
    seccomp_family=(0xC000003E, 0x40000003, 0x4000003E),  # itself, 32-bit x86, x32
    virtualisation_flags=frozenset({"vmx", "svm"}),
    kvm_advice="modprobe kvm_intel or kvm_amd",
    kernel_params=(
        "tsc=reliable",
        "no_timer_check",
        "rcupdate.rcu_expedited=1",
        "i8042.direct=1",
        "i8042.dumbkbd=1",
        "i8042.nopnp=1",
        "i8042.noaux=1",
        "noreplace-smp",
        "reboot=k",
        "cryptomgr.notests",
        "net.ifnames=0",
        "pci=lastbus=0",
    ),
    early_console="earlyprintk=ttyS0,115200",
    iommu_params=("intel_iommu=on", "iommu=pt"),
    # The fewest features that run x86-64-v2 programs: `max` boots measurably slower under emulation (docs/GUEST.md).
    # No MTRRs: they have no effect on emulated memory, and to set them for a new CPU the kernel makes all others spin.
    emulated_cpu="qemu64,+ssse3,+sse4.1,+sse4.2,+popcnt,-mtrr",
    maps_pmem=True,
    measures_clock=True,
)
AARCH64 = Architecture(
    name="aarch64",
    debian="arm64",
    qemu_paths=("/usr/bin/qemu-system-aarch64", "/opt/kata/bin/qemu-system-aarch64", "/usr/libexec/qemu-kvm"),
    kernel_magic=(0x38, b"ARMd"),  # Documentation/arch/arm64/booting.rst
    elf_machine=183,
    # Source: include/uapi/asm-generic/unistd.h
    system_calls=SystemCalls(setgroups=159, setresuid=147, setresgid=149, seccomp=277, bpf=280),
    seccomp_family=(0xC00000B7, 0x40000028),  # itself, 32-bit ARM
    virtualisation_flags=frozenset(),
    kvm_advice="boot the node's kernel at EL2, which a cloud offers on bare metal only",
    # Kata's is the first; the others are those of its x86 guests that hold here, too.
    kernel_params=("iommu.passthrough=0", "rcupdate.rcu_expedited=1", "cryptomgr.notests", "net.ifnames=0"),
    early_console="earlycon",  # of the device tree's stdout-path: the PL011
    iommu_params=(),
    emulated_cpu="max,pauth-impdef=on",  # pointer authentication by the architecture's own cipher is slow to emulate
    maps_pmem=False,
    measures_clock=False,
)

_Q35 = MachineType(
    name="q35",
    architecture=X86_64,
    is_pci=True,
    has_acpi_bridges=True,
    bridge_slots=30,
    plugs_vcpus=True,
    needs_uefi_for_acpi=False,
    has_iommu=True,
    can_be_saved=True,
    refuses_confidential="",
    properties={"sata": False, "smbus": False, "vmport": False, "hpet": False},
    options=("-rtc", "base=utc,driftfix=slew,clock=host", "-global", "kvm-pit.lost_tick_policy=discard"),
    own_firmware="",
    panic_device="pvpanic",
)
_MICROVM = MachineType(
    name="microvm",
    architecture=X86_64,
    is_pci=False,
    has_acpi_bridges=False,
    bridge_slots=0,
    plugs_vcpus=False,
    needs_uefi_for_acpi=False,
    has_iommu=False,
    can_be_saved=False,
    refuses_confidential="only q35 can be confidential",
    properties={},
    # virtio-mmio speaks the legacy protocol by default; vhost-user back ends do not support it.
    options=("-global", "virtio-mmio.force-legacy=false"),
    # SeaBIOS, which QEMU takes where a distribution does not replace it, writes the ACPI tables to the end of RAM,
    # where QEMU loads the initrd: the guest hangs, depending on the initrd's size. Source: QEMU's x86_load_linux;
    # its callers say how much to leave free there, and microvm's leaves nothing.
    own_firmware="qboot.rom",
    panic_device="",
)
_VIRT = MachineType(
    name="virt",
    architecture=AARCH64,
    is_pci=True,
    has_acpi_bridges=False,
    bridge_slots=16,
    plugs_vcpus=False,
    needs_uefi_for_acpi=True,
    has_iommu=False,  # its SMMUv3 does not follow VFIO's mappings
    can_be_saved=False,  # Kata: x-ignore-shared is not supported on arm64
    refuses_confidential="only q35 can be confidential, and Arm's CCA is not supported",
    properties={"gic-version": "max"},  # the host's with KVM
    options=("-rtc", "base=utc,clock=host"),
    own_firmware="",
    panic_device="pvpanic-pci",
)
ARCHITECTURES: Mapping[str, Architecture] = {each.name: each for each in (X86_64, AARCH64)}
"""By the kernel's name."""
MACHINE_TYPES: Mapping[str, MachineType] = {each.name: each for each in (_Q35, _MICROVM, _VIRT)}
"""By QEMU's name. The first of an architecture is its default."""


def go_architecture(name: str) -> str:
    """Go's, OCI's and Debian's name of the architecture that `uname -m` calls `name`; that one if it is not known."""
    return ARCHITECTURES[name].debian if name in ARCHITECTURES else name


def machine_types_of(architecture: Architecture) -> tuple[str, ...]:
    """The names of its machine types, the default first."""
    return tuple(each.name for each in MACHINE_TYPES.values() if each.architecture is architecture)
