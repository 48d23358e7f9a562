"""The need of a pod's VM on its node, as the shim asks for it before the boot (`pyshim/pod/plan/placed.py`)."""

from pyshim.model.config import Config
from pyshim.model.host_facts import HostFacts
from pyshim.model.oci import ContainerKind
from pyshim.model.placement import Need, whole_cpus
from pyshim.model.units import MIB
from pyshim.node.kubernetes.pod_size import PodSizing
from pyshim.node.kubernetes.pod_vm import boot_record
from pyshim.resources.sizing.plan.static import is_resizable
from pyshim.resources.sizing.plan.workload import requested_cpu

_GUARANTEED, _BURSTABLE = "/kubepods", "/kubepods/burstable"
"""The kubelet's cgroups of Guaranteed pods, and of others."""


def pod_need(name: str, pod: PodSizing, config: Config, host: HostFacts) -> Need:
    """`name` is the pod's NAMESPACE/NAME, which stands for the sandbox's id, too."""
    record = boot_record(pod, config, host)
    cpu = requested_cpu(ContainerKind.POD_SANDBOX, pod.sandbox_annotations(), {})
    whole = whole_cpus(
        shares=cpu.shares,
        quota=cpu.quota_us,
        period=cpu.period_us,
        cgroup_parent=_GUARANTEED if pod.is_guaranteed() else _BURSTABLE,
    )
    return Need(
        sandbox_id=name,
        name=name,
        vcpus=record.vcpus.granted,
        memory_bytes=record.memory_mib.granted * MIB,
        exclusive=whole > 0 and not is_resizable(config),
    )
