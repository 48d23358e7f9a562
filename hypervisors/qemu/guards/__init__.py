"""The options that make a VM confidential: an object, two machine properties, and the firmware.

`tdx.py` and `sev.py` build them for each technology. This module chooses, and refuses a VM that contradicts its guard.
The rest (private memory, no shared file system, no growth) is decided in the VM's plan.
"""

from hypervisors.qemu.guards import sev, tdx
from pyshim.model.confidential import Guard, SevGuard, SnpGuard, TdxGuard
from pyshim.model.host_facts import Accelerator
from pyshim.model.vm import ImageDriver, MemoryBacking, VmConfig


def guard_object(guard: Guard, encryption: sev.Encryption) -> tuple[str, ...]:
    """The -object that the machine's `confidential-guest-support` refers to."""
    match guard:
        case TdxGuard():
            return tdx.tdx_object(guard)
        case SevGuard():
            return sev.sev_object(guard, encryption)
        case SnpGuard():
            return sev.snp_object(guard, encryption)


def machine_properties(guard: Guard) -> dict[str, str]:
    """The split irqchip is the only one that TDX accepts; Kata uses it for all guards."""
    return {"kernel-irqchip": "split", "confidential-guest-support": guard_id(guard)}


def guard_id(guard: Guard) -> str:
    match guard:
        case TdxGuard():
            return tdx.ID
        case SevGuard():
            return sev.SEV_ID
        case SnpGuard():
            return sev.SNP_ID


def firmware(guard: Guard, path: str) -> tuple[str, ...]:
    """SEV's firmware is flash, which every QEMU measures. TDX and SNP lack flash's read-only memory slots."""
    if isinstance(guard, SevGuard):
        return ("-drive", f"if=pflash,format=raw,read-only=on,file={path.replace(',', ',,')}")
    return ("-bios", path)


def problem(config: VmConfig, guard: Guard) -> str:
    """The reason why this VM cannot be confidential; empty if it can.

    Without this check it would start with less protection than requested, or fail without the cause.
    """
    if config.machine_type != "q35":
        return f"a confidential guest needs machine type q35, not {config.machine_type!r}"
    if config.cpu.accelerator is not Accelerator.KVM:
        return "a confidential guest needs KVM"
    if config.boot.firmware is None:
        return "a confidential guest needs firmware: its first code is measured"
    if config.share is not None:
        return "a confidential guest shares no files with the host"
    if config.memory.backing is not MemoryBacking.PRIVATE or config.memory.virtio_mem:
        return "a confidential guest has private memory of fixed size"
    if config.memory.max_mib > config.memory.boot_mib or config.cpu.max_vcpus > config.cpu.boot_vcpus:
        return "a confidential guest cannot grow"
    if config.boot.image is not None and config.boot.image_driver is ImageDriver.PMEM:
        return "a confidential guest's root image cannot be persistent memory"
    if isinstance(guard, TdxGuard):
        return tdx.problem(config, guard)
    return sev.problem(guard)
