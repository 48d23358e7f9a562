"""Refuses a VM that does not fit this host now, with the numbers, before anything is made."""

import logging
import math

from msgspec.structs import replace

from pyshim.model.config import Config, HypervisorConfig
from pyshim.model.errors import FailedPrecondition
from pyshim.model.host_facts import (
    HOST_SIDE_MIB,
    KVM_HOST_SIDE_MIB,
    REMOTE_HOST_SIDE_MIB,
    CapacityFacts,
    CapacityQuestion,
    HostFacts,
)
from pyshim.model.sizing import Dimension, SizingRecord, decimal
from pyshim.model.units import MIB
from pyshim.model.vm import MemoryBacking
from pyshim.resources.cgroups.plan.cgroups import parent_cgroup

log = logging.getLogger(__name__)


def host_side_mib(config: Config, host: HostFacts) -> int:
    """MiB that a sandbox of `config` takes on `host` beside guest RAM."""
    if config.is_remote:
        return REMOTE_HOST_SIDE_MIB
    emulates = config.hypervisor.accelerator == "tcg" or not host.kvm_usable
    return HOST_SIDE_MIB if emulates else KVM_HOST_SIDE_MIB


def pods_host(host: HostFacts, facts: CapacityFacts) -> HostFacts:
    """`host` with the CPUs only that the pod's cgroup may use."""
    cpus = facts.cgroup.cpus
    if cpus is None or len(cpus) >= host.cpu_count:
        return host
    return replace(host, cpu_count=len(cpus), cpu_cgroup=facts.cgroup.cpus_path)


def capacity_check(record: SizingRecord, config: Config, host: HostFacts, facts: CapacityFacts) -> tuple[str, ...]:
    """Warnings about a VM that fits only by overcommitting; each is one sentence with its numbers.

    Raises FailedPrecondition for one that cannot fit, and, with `strict_memory`, for one whose RAM and host side
    together are over the limit of the pod's cgroup.
    """
    check_vcpus(config, host)
    _check_memory(record.memory_mib, config, facts)
    beside_mib = host_side_mib(config, host)
    memory = _cgroup_memory(record.memory_mib.granted, beside_mib, config, facts)
    return (*memory, *_cgroup_cpu(record.vcpus.granted, facts))


def check_vcpus(config: Config, host: HostFacts) -> None:
    """Raises FailedPrecondition for a pod whose annotation `default_vcpus` is above the host's CPUs, as in Kata.

    The file's, and a workload above them, are limited to them.
    """
    base = config.hypervisor.default_vcpus
    if "default_vcpus" in config.annotated and math.ceil(base) > host.cpu_count:
        origin = config.origin("default_vcpus")
        owner = f"cgroup '{host.cpu_cgroup}'" if host.cpu_cgroup else "this host"
        raise FailedPrecondition(
            f"size vm: default_vcpus = {decimal(base)} in {origin}: {owner} has {host.cpu_count} CPUs"
        )


def _check_memory(memory: Dimension, config: Config, facts: CapacityFacts) -> None:
    hypervisor = config.hypervisor
    # Compare the size before the limit by the host's memory: any size limited by that would fit.
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
        free = {"available_mib": facts.available_mib, "swap_free_mib": swap_mib}
        log.warning("vm does not fit", extra={"wanted_mib": wanted_mib, **free})
        bound_mib = _steady_bound(facts.available_mib + swap_mib, wanted_mib)
        swap = ", free swap included" if swap_mib else ""
        raise FailedPrecondition(f"{vm} do not fit on this host: less than {bound_mib} MiB are available{swap}")


def _steady_bound(free_mib: int, wanted_mib: int) -> int:
    """A figure above `free_mib` that seldom changes: the kubelet repeats the call, and merges events of equal text."""
    return min(1 << free_mib.bit_length(), wanted_mib)


def memory_backing(hypervisor: HypervisorConfig) -> MemoryBacking:
    """The backend of the guest's RAM: a shared file where other processes map it."""
    if hypervisor.enable_hugepages:
        return MemoryBacking.HUGEPAGES
    by_vhost_user = hypervisor.enable_vhost_user_store or hypervisor.agent_channel == "vhost-user"
    shared = hypervisor.shared_fs != "none" or by_vhost_user
    return MemoryBacking.SHARED_MEMFD if shared else MemoryBacking.PRIVATE


def capacity_question(config: Config, cgroups_path: str) -> CapacityQuestion:
    """The questions to the host before a sandbox below `cgroups_path` is planned. Raises what `parent_cgroup` does."""
    is_huge = memory_backing(config.hypervisor) is MemoryBacking.HUGEPAGES
    return CapacityQuestion(parent_cgroup=parent_cgroup(cgroups_path), hugepages=is_huge)


def _cgroup_memory(ram_mib: int, beside_mib: int, config: Config, facts: CapacityFacts) -> tuple[str, ...]:
    """Guest RAM and the VMM's own memory against the cgroup's limit: beyond it the host's OOM killer ends the VM.

    Huge pages are not charged to the memory controller. Source: the kernel's admin-guide/cgroup-v2.rst.
    """
    limit = facts.cgroup.memory_bytes
    charged_mib = (0 if config.hypervisor.enable_hugepages else ram_mib) + beside_mib
    if limit is None or charged_mib * MIB <= limit:
        return ()
    text = (
        f"{charged_mib} MiB ({charged_mib - beside_mib} of guest RAM, {beside_mib} of the VMM and its servers) "
        f"exceed the {limit // MIB} MiB that cgroup '{facts.cgroup.memory_path}' allows: "
        f"a guest that uses its memory is killed by the host"
    )
    if config.runtime.strict_memory:
        raise FailedPrecondition(f"size vm: {text} (strict_memory in '{config.source}')")
    if config.hypervisor.enable_mem_prealloc and config.runtime.sandbox_cgroup_only and ram_mib * MIB > limit:
        raise FailedPrecondition(f"size vm: {text}, and enable_mem_prealloc uses all of it at once")
    return (text,)


def _cgroup_cpu(vcpus: int, facts: CapacityFacts) -> tuple[str, ...]:
    """A warning if at least one vCPU can never run. Differences below one CPU come from rounding and the base."""
    quota = facts.cgroup.cpu_quota
    if quota is None or vcpus - quota < 1:
        return ()
    return (
        f"{vcpus} vCPUs share the {decimal(quota)} CPUs that cgroup '{facts.cgroup.cpu_path}' allows: "
        f"the guest is throttled before all of them are busy",
    )
