"""A VM's placement: the request to the node's plugin, its answer in the plan, the guest's NUMA nodes. Pure."""

from msgspec.structs import replace

from pyshim.model.host_facts import Machine
from pyshim.model.oci import OciSpec, pod_of
from pyshim.model.plans import SandboxPlan
from pyshim.model.sizing import PlacementRequest, SavedPlacement, whole_cpus
from pyshim.model.units import MIB
from pyshim.resources.sizing.plan.numa import VmNeeds, numa_plan
from pyshim.resources.sizing.plan.static import is_resizable
from pyshim.resources.sizing.plan.workload import requested_cpu


def placement_request(plan: SandboxPlan, spec: OciSpec) -> PlacementRequest:
    """What the VM needs at boot. A VM that grows gets no CPUs of its own, since their number changes."""
    pod = pod_of(spec.annotations)
    cpu = requested_cpu(plan.kind, spec.annotations, spec.raw)
    whole = whole_cpus(shares=cpu.shares, quota=cpu.quota_us, period=cpu.period_us, cgroup_parent=spec.cgroups_path)
    return PlacementRequest(
        sandbox_id=plan.sandbox_id,
        name="/".join(filter(None, (pod.namespace, pod.name))) or plan.sandbox_id,
        vcpus=plan.vm.cpu.boot_vcpus,
        memory_bytes=plan.vm.memory.boot_mib * MIB,
        exclusive=whole > 0 and not is_resizable(plan.config),
    )


def with_placement(plan: SandboxPlan, answer: SavedPlacement) -> SandboxPlan:
    """The plan with this answer. Guest RAM is on its nodes, unless passed-through devices determine others."""
    nodes = plan.local_vm.memory.host_nodes or answer.placement.memory_nodes
    memory = replace(plan.local_vm.memory, host_nodes=nodes)
    return replace(plan, placement=answer, vm=replace(plan.local_vm, memory=memory))


def with_guest_nodes(plan: SandboxPlan, machine: Machine) -> SandboxPlan:
    """The plan of a guest with those NUMA nodes of `machine` that its VM is on. Raises what `numa_plan` raises."""
    vm = plan.local_vm
    near = vm.memory.host_nodes if plan.placement is None else ()
    if not near:
        functions = [function for node in plan.devices.nodes() for function in node.functions]
        near = tuple(function.numa_node for function in functions if function.numa_node >= 0)
    needs = VmNeeds(vcpus=vm.cpu.boot_vcpus, memory_mib=vm.memory.boot_mib, near=frozenset(near))
    found = numa_plan(plan.config, machine, needs, plan.placement.placement if plan.placement else None)
    memory = replace(vm.memory, host_nodes=found.memory_nodes or vm.memory.host_nodes)
    return replace(plan, vm=replace(vm, memory=memory, numa=found.nodes), numa_why=found.why)
