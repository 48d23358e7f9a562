"""Additions to the plain argv that make a VM confidential: one object, two properties of the machine, a firmware.

`tdx.py` and `sev.py` hold the words of each technology; this module chooses, and refuses what contradicts a guard.
Everything else about such a VM (private memory, no shared file system, no growth) is decided in its plan.
"""

from hypervisors.qemu.guards import sev, tdx
from pyshim.model.confidential import Guard, SevGuard, SnpGuard, TdxGuard
from pyshim.model.host_facts import Accelerator
from pyshim.model.vm import ImageDriver, MemoryBacking, VmConfig


def guard_object(guard: Guard, encryption: sev.Encryption) -> tuple[str, ...]:
    """The -object the machine names in `confidential-guest-support`."""
    match guard:
        case TdxGuard():
            return tdx.tdx_object(guard)
        case SevGuard():
            return sev.sev_object(guard, encryption)
        case SnpGuard():
            return sev.snp_object(guard, encryption)


def machine_properties(guard: Guard) -> dict[str, str]:
    """TDX accepts no other irqchip, and the interrupt controller in QEMU sees no guest memory; Kata's rule for all."""
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
    """SEV's as flash, which every QEMU measures; flash needs read-only memory slots, which TDX and SNP do not have."""
    if isinstance(guard, SevGuard):
        return ("-drive", f"if=pflash,format=raw,read-only=on,file={path.replace(',', ',,')}")
    return ("-bios", path)


def problem(config: VmConfig, guard: Guard) -> str:
    """Why this VM cannot be confidential; empty when it can. Without this check
    such a VM would start with less protection than asked for, or fail without naming the cause."""
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
