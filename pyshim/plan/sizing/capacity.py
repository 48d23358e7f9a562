"""Does the planned VM fit this host, now? What cannot fit is refused before anything is made, with the numbers."""

import math

from pyshim.model.capacity import CapacityFacts
from pyshim.model.config import Config
from pyshim.model.errors import FailedPrecondition
from pyshim.model.host_facts import HostFacts
from pyshim.plan.sizing.record import Dimension, SizingRecord, decimal
from pyshim.plan.sizing.workload import MIB

HOST_SIDE_MIB = 206
"""What one sandbox takes beside guest RAM, as measured with emulation: QEMU 7.2 up to 180 MiB (its translated code
included), virtiofsd 4, the shim 22; proportional set sizes, one container running. With KVM QEMU takes less."""


def capacity_check(record: SizingRecord, config: Config, host: HostFacts, facts: CapacityFacts) -> tuple[str, ...]:
    """Warnings about a VM that fits only by overcommitting; each is one sentence with its numbers.

    Raises FailedPrecondition for one that cannot fit, and, with `strict_memory`, for one whose RAM and host side
    together are over the limit of the pod's cgroup.
    """
    _check_vcpus(config, host)
    _check_memory(record.memory_mib, config, facts)
    return (*_cgroup_memory(record.memory_mib.granted, config, facts), *_cgroup_cpu(record.vcpus.granted, facts))


def _check_vcpus(config: Config, host: HostFacts) -> None:
    """A workload above the host's CPUs is held at them; a base above them can only be a mistake in the file."""
    base = config.hypervisor.default_vcpus
    if math.ceil(base) > host.cpu_count:
        raise FailedPrecondition(
            f"size vm: default_vcpus = {decimal(base)} in '{config.source}': this host has {host.cpu_count} CPUs"
        )


def _check_memory(memory: Dimension, config: Config, facts: CapacityFacts) -> None:
    hypervisor = config.hypervisor
    # The host's memory as a limit would make any size fit: what is compared is what was wanted.
    ceiling_mib = hypervisor.default_maxmemory_mib or memory.rounded
    wanted_mib = memory.granted if memory.granted >= memory.rounded else min(memory.rounded, ceiling_mib)
    vm = f"size vm: its {wanted_mib} MiB of RAM ({memory.base_source} {decimal(memory.base)} MiB"
    vm += f" + {decimal(memory.requested)} MiB)" if memory.requested else ")"
    backing = facts.backing
    if backing is not None and wanted_mib % backing.page_mib:
        raise FailedPrecondition(f"{vm} are no multiple of the page of {backing.name}, {backing.page_mib} MiB")
    if backing is not None and wanted_mib > backing.free_mib:
        raise FailedPrecondition(f"{vm} do not fit in {backing.name}: {backing.free_mib} MiB are free")
    if hypervisor.enable_hugepages or facts.available_mib is None:
        return
    swap_mib = 0 if hypervisor.enable_mem_prealloc else facts.swap_free_mib
    if wanted_mib > facts.available_mib + swap_mib:
        swap = f" and {swap_mib} MiB of swap free" if swap_mib else ""
        raise FailedPrecondition(f"{vm} do not fit on this host: {facts.available_mib} MiB are available{swap}")


def _cgroup_memory(ram_mib: int, config: Config, facts: CapacityFacts) -> tuple[str, ...]:
    """Guest RAM and the VMM's own memory against the cgroup's limit: beyond it the host's OOM killer ends the VM.

    Huge pages are not charged to the memory controller. Source: the kernel's admin-guide/cgroup-v2.rst.
    """
    limit = facts.cgroup.memory_bytes
    charged_mib = (0 if config.hypervisor.enable_hugepages else ram_mib) + HOST_SIDE_MIB
    if limit is None or charged_mib * MIB <= limit:
        return ()
    text = (
        f"{charged_mib} MiB ({charged_mib - HOST_SIDE_MIB} of guest RAM, {HOST_SIDE_MIB} of the VMM and its servers) "
        f"exceed the {limit // MIB} MiB that cgroup '{facts.cgroup.memory_path}' allows: "
        f"a guest that uses its memory is killed by the host"
    )
    if config.runtime.strict_memory:
        raise FailedPrecondition(f"size vm: {text} (strict_memory in '{config.source}')")
    if config.hypervisor.enable_mem_prealloc and config.runtime.sandbox_cgroup_only and ram_mib * MIB > limit:
        raise FailedPrecondition(f"size vm: {text}, and enable_mem_prealloc uses all of it at once")
    return (text,)


def _cgroup_cpu(vcpus: int, facts: CapacityFacts) -> tuple[str, ...]:
    """A difference below one CPU is rounding and base; from one on, a vCPU is there that can never run."""
    quota = facts.cgroup.cpu_quota
    if quota is None or vcpus - quota < 1:
        return ()
    return (
        f"{vcpus} vCPUs share the {decimal(quota)} CPUs that cgroup '{facts.cgroup.cpu_path}' allows: "
        f"the guest is throttled before all of them are busy",
    )
