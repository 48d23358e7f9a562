"""The VM of a pod, as the shim decides it: its configuration, its size by sizing policy, its need on the node."""

import math
from collections.abc import Mapping

from msgspec.structs import replace

from pyshim.config.load import for_pod, refuse_unsupported, typed
from pyshim.config.sources import Source
from pyshim.model.config import Config
from pyshim.model.host_facts import HostFacts
from pyshim.model.oci import ContainerKind
from pyshim.model.sizing import PlacementRequest, SizingRecord, whole_cpus
from pyshim.model.units import MIB
from pyshim.node.kubernetes.pod_size import PodSizing
from pyshim.resources.sizing.plan.resize import Demand, VmSize, resize_plan
from pyshim.resources.sizing.plan.static import DYNAMIC, POLICIES, boot_size, headroom, is_resizable, static_size
from pyshim.resources.sizing.plan.workload import Workload, requested_cpu, workload

PASSED_ON = "io.katacontainers."
"""Annotations that reach the shim: `pod_annotations` of the container runtime."""
BLOCK_MIB = 128
"""Memory block of x86-64 guests below 64 GiB, in which a running VM grows."""
_GUARANTEED, _BURSTABLE = "/kubepods", "/kubepods/burstable"
"""The kubelet's cgroups of Guaranteed pods, and of others."""


def pod_config(source: Source, annotations: Mapping[str, str]) -> Config:
    """The shim's configuration for a pod with these annotations. Raises ShimError if the shim refuses them."""
    passed = {name: text for name, text in annotations.items() if name.startswith(PASSED_ON)}
    # Only the node can see its own files.
    effective = for_pod(source, passed, exists=lambda _path: True)
    config = typed(effective)
    refuse_unsupported(effective)
    return config


def policy_in_force(config: Config) -> str:
    """The policy that sizes the VMs of `config`: a static one, or `dynamic`."""
    return DYNAMIC if is_resizable(config) else config.runtime.sizing_policy


def boot_record(pod: PodSizing, config: Config, host: HostFacts) -> SizingRecord:
    """The size with which `pod`'s VM boots on `host`."""
    if is_resizable(config):
        return boot_size(config, host)
    return static_size(config, host, _workload(pod))


def sizes_by_policy(pod: PodSizing, config: Config, host: HostFacts) -> dict[str, SizingRecord]:
    """The VM's size by each static policy and, if it is resizable, by `dynamic`, once all containers run."""
    request = _workload(pod)
    sizes = {}
    for policy in POLICIES:
        chosen = replace(config, runtime=replace(config.runtime, sizing_policy=policy))
        sizes[policy] = static_size(chosen, host, request)
    if is_resizable(config):
        sizes[DYNAMIC] = _grown(pod, request, config, host)
    return sizes


def _workload(pod: PodSizing) -> Workload:
    return workload(ContainerKind.POD_SANDBOX, pod.sandbox_annotations(), {})


def _grown(pod: PodSizing, request: Workload, config: Config, host: HostFacts) -> SizingRecord:
    """The size of a resizable VM once all containers run."""
    boot = boot_size(config, host)
    room = headroom(config, host, boot)
    vm = VmSize(
        boot_vcpus=boot.vcpus.granted,
        vcpus=boot.vcpus.granted,
        max_vcpus=room.max_vcpus,
        boot_memory_mib=boot.memory_mib.granted,
        memory_mib=boot.memory_mib.granted,
        max_memory_mib=room.max_memory_mib,
        block_mib=BLOCK_MIB,
        free_slots=room.memory_slots,
        virtio_mem=config.hypervisor.enable_virtio_mem,
    )
    containers = Demand(
        name="all",
        vcpus=request.vcpus,
        cpus=frozenset(),
        memory_bytes=request.memory_bytes,
        hugepage_bytes=math.ceil(pod.huge_pages()),
    )
    return resize_plan(vm, (containers,), config, host).record


def pod_need(name: str, pod: PodSizing, config: Config, host: HostFacts) -> PlacementRequest:
    """`name` is the pod's NAMESPACE/NAME, which stands for the sandbox's id, too."""
    record = boot_record(pod, config, host)
    cpu = requested_cpu(ContainerKind.POD_SANDBOX, pod.sandbox_annotations(), {})
    whole = whole_cpus(
        shares=cpu.shares,
        quota=cpu.quota_us,
        period=cpu.period_us,
        cgroup_parent=_GUARANTEED if pod.is_guaranteed() else _BURSTABLE,
    )
    return PlacementRequest(
        sandbox_id=name,
        name=name,
        vcpus=record.vcpus.granted,
        memory_bytes=record.memory_mib.granted * MIB,
        exclusive=whole > 0 and not is_resizable(config),
    )
