"""Judges a pod of a class: the size of its VM with the findings, or the reason of a denial. Pure."""

from collections.abc import Mapping
from fractions import Fraction

from pyshim.model.config import Config
from pyshim.model.errors import InvalidArgument
from pyshim.model.host_facts import HostFacts, unbounded
from pyshim.model.sizing import decimal
from pyshim.model.units import MIB
from pyshim.node.kubernetes.agreement import PolicyView, explain_pod
from pyshim.node.kubernetes.manifest import PodManifest, pod_sizing
from pyshim.node.kubernetes.overhead import class_overhead
from pyshim.node.kubernetes.pod_size import CPU, MEMORY, PodSizing
from pyshim.node.kubernetes.pod_vm import policy_in_force
from pyshim.node.webhook.pod_class import KIND, PodClass
from pyshim.resources.sizing.plan.capacity import check_vcpus


def vm_of_pod(manifest: PodManifest, chosen: PodClass, overhead: Mapping[str, Fraction] | None) -> PolicyView:
    """The pod's VM by the policy in force; `overhead` replaces that of the pod's spec.

    Raises ShimError for a pod that no node would start, or that has what the operator denies.
    """
    config = chosen.config(manifest.annotations)
    sizing = pod_sizing(manifest, KIND, overhead)
    _check_network(manifest, config)
    node = unbounded(chosen.node) if config.is_remote else chosen.node
    check_vcpus(config, node)
    view = explain_pod(sizing, config, node, host_side_mib=chosen.host_side_of(config)).view_in_force
    _check_room(manifest, sizing, node)
    if refused := [found for found in view.findings if found.kind in chosen.denied]:
        raise InvalidArgument(f"admit {manifest.title}: {refused[0].kind.value}: {refused[0].text}")
    return view


def overhead_of(chosen: PodClass) -> dict[str, Fraction]:
    """The least overhead that covers the VMs of the class.

    It stands for the overhead of the RuntimeClass, which the API server writes into pods, not into templates.
    """
    config = chosen.config({})
    fitting = class_overhead(config, policy_in_force(config), chosen.host_side_of(config))
    return {CPU: fitting.cpus, MEMORY: fitting.memory_mib * MIB}


def _check_room(manifest: PodManifest, pod: PodSizing, node: HostFacts) -> None:
    """Raises InvalidArgument for a pod that the scheduler places on no node, as far as the largest one is known."""
    reserved = pod.reserved()
    for name, available, unit, unit_name in ((CPU, node.cpu_count, 1, "CPUs"), (MEMORY, node.memory_mib, MIB, "MiB")):
        wanted = reserved.get(name, Fraction(0)) / unit
        if available and wanted > available:
            raise InvalidArgument(
                f"admit {manifest.title}: requests + overhead are {decimal(wanted)} {unit_name}, "
                f"the largest node has {available}"
            )


def _check_network(manifest: PodManifest, config: Config) -> None:
    if manifest.spec.get("hostNetwork") is True and (config.is_remote or not config.runtime.allow_host_network):
        raise InvalidArgument(f"admit {manifest.title}: hostNetwork is true, and a VM cannot have the host's network")
