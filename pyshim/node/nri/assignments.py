"""The CPUs and NUMA nodes of a VM, chosen from the machine's topology and the placements so far; pure, deterministic.

A VM is placed once, as a whole, before it boots. In this order:

1. Nodes: the fewest whose free CPUs and free memory suffice, and of those the nearest to each other. Memory is that of
   the same nodes; for a node without memory, it is that of the nearest node that has some. If no nodes have enough
   memory, it comes from all of them.
2. Exclusive CPUs, as many as vCPUs: within one socket, one die, one L3 where that is possible, in whole cores. Among
   these, the group of CPUs that has the fewest left over is taken, so that large groups stay whole for large VMs. CPUs
   that other VMs share are taken last. Isolated CPUs are taken first, and never shared.
3. Shared VMs get all shared CPUs of their nodes, those with the least vCPUs for each CPU.

Exclusive CPUs and all nodes stay until the VM ends: memory does not move. Which CPUs are shared changes with every VM
that comes or goes, and shared VMs and the VMM's other threads follow. If their nodes have no shared CPU left, they use
the nearest ones.
"""

from collections.abc import Callable, Iterable, Mapping

from msgspec.structs import replace

from pyshim.model.errors import InvalidArgument
from pyshim.model.host_facts import cpuset_text
from pyshim.model.sizing import Placement, PlacementRequest
from pyshim.node.nri.capacity import Assignments, Capacity, Other, PlacementError
from pyshim.node.nri.choice import action_on, exclusive_placement, nodes_text, shared_placement

__all__ = [
    "Assignments",
    "Other",
    "Placement",
    "PlacementError",
    "PlacementRequest",
    "apply",
    "check_need",
    "free_cpus",
    "keep",
    "place",
    "place_or_share",
    "place_within",
    "release",
    "shared_cpus",
    "with_others",
]


def place(assignments: Assignments, need: PlacementRequest) -> Assignments:
    """`need` has a placement, and shared VMs use the CPUs that remain shared.

    The same need again changes nothing; another need of the same sandbox replaces it.

    Raises PlacementError when there are not enough CPUs, InvalidArgument for an empty need.
    """
    check_need(need)
    if assignments.needs.get(need.sandbox_id) == need:
        return assignments
    before = release(assignments, need.sandbox_id)
    capacity = Capacity(before)
    if not capacity.shared:
        raise PlacementError(f"{action_on(need)}: no CPU is left to share")
    placement = exclusive_placement(capacity, need) if need.exclusive else shared_placement(capacity, need)
    return _add(before, need, placement)


def check_need(need: PlacementRequest) -> None:
    """Raises InvalidArgument for an empty need."""
    if need.vcpus < 1 or need.memory_bytes < 0:
        raise InvalidArgument(f"{action_on(need)}: {need.vcpus} vCPUs and {need.memory_bytes} bytes are no VM")


def place_within(assignments: Assignments, need: PlacementRequest, nodes: tuple[int, ...]) -> Placement:
    """The placement that `place` makes on CPUs of these nodes. Raises PlacementError."""
    capacity = Capacity(release(assignments, need.sandbox_id), nodes)
    if not capacity.of_nodes(capacity.shared, nodes):
        raise PlacementError(f"{action_on(need)}: no CPU of {nodes_text(nodes)} is left to share")
    return exclusive_placement(capacity, need) if need.exclusive else shared_placement(capacity, need)


def apply(
    assignments: Assignments, need: PlacementRequest, placement: Placement, moved: Mapping[str, tuple[int, ...]]
) -> Assignments:
    """`need` has `placement`, which a policy chose, and the VMs in `moved` have new CPU nodes.

    Raises PlacementError for CPUs, nodes and VMs that do not exist or are taken.
    """
    capacity = Capacity(assignments)
    if placement.exclusive and len(set(placement.vcpu_cpus)) != need.vcpus:
        raise PlacementError(f"{action_on(need)}: CPUs {cpuset_text(placement.vcpu_cpus)} for {need.vcpus} vCPUs")
    _check_nodes(capacity, need, placement.cpu_nodes)
    if without := {node for node in placement.memory_nodes if node not in capacity.memory_nodes}:
        raise PlacementError(f"{action_on(need)}: no memory in node {cpuset_text(without)}")
    ordered = replace(
        placement,
        vcpu_cpus=tuple(sorted(placement.vcpu_cpus)),
        cpu_nodes=tuple(sorted(set(placement.cpu_nodes))),
        memory_nodes=tuple(sorted(set(placement.memory_nodes))),
    )
    if placement.exclusive and set(placement.vcpu_cpus) - set(capacity.of_nodes(capacity.cpus, placement.cpu_nodes)):
        raise PlacementError(f"{action_on(need)}: CPUs {cpuset_text(placement.vcpu_cpus)} are of other nodes")
    placements = dict(assignments.placements)
    for sandbox_id, nodes in moved.items():
        former = placements.get(sandbox_id)
        if former is None or former.exclusive:
            raise PlacementError(f"{action_on(need)}: VM {sandbox_id[:100]!r} does not share CPUs, so it cannot move")
        _check_nodes(capacity, need, nodes)
        placements[sandbox_id] = replace(former, cpu_nodes=tuple(sorted(set(nodes))))
    return keep(replace(assignments, placements=placements), replace(need, exclusive=placement.exclusive), ordered)


def _check_nodes(capacity: Capacity, need: PlacementRequest, nodes: tuple[int, ...]) -> None:
    if not nodes or (without := {node for node in nodes if node not in capacity.cpu_nodes}):
        raise PlacementError(f"{action_on(need)}: no CPU in node {cpuset_text(without) if nodes else 'none'}")


def free_cpus(assignments: Assignments) -> tuple[int, ...]:
    """The CPUs that may become exclusive, in ascending order. One of the shared CPUs has to stay shared."""
    return tuple(sorted(Capacity(assignments).free))


def place_or_share(
    assignments: Assignments,
    need: PlacementRequest,
    place: Callable[[Assignments, PlacementRequest], Assignments] = place,
) -> Assignments:
    """As `place`, but a VM that finds no exclusive CPUs gets shared ones; its need and `why` say so."""
    try:
        return place(assignments, need)
    except PlacementError as error:
        if not need.exclusive:
            raise
        shared = place(assignments, replace(need, exclusive=False))
        placement = shared.placements[need.sandbox_id]
        why = f"{str(error).partition(': ')[2]}; {placement.why}"
        return replace(shared, placements={**shared.placements, need.sandbox_id: replace(placement, why=why)})


def release(assignments: Assignments, sandbox_id: str) -> Assignments:
    """The sandbox's placement has ended, and shared VMs use its CPUs. Nothing changes if it had none."""
    if sandbox_id not in assignments.needs:
        return assignments
    return _with_shared_cpus(
        replace(
            assignments,
            needs={known: need for known, need in assignments.needs.items() if known != sandbox_id},
            placements={known: placement for known, placement in assignments.placements.items() if known != sandbox_id},
        )
    )


def keep(assignments: Assignments, need: PlacementRequest, placement: Placement) -> Assignments:
    """`need` has its `placement` from an earlier run of the plugin: the nodes, and the CPUs if they are exclusive.

    Raises PlacementError when a CPU of it is offline, reserved or taken, or a node is not there.
    """
    before = release(assignments, need.sandbox_id)
    capacity = Capacity(before)
    if unknown := {*placement.cpu_nodes, *placement.memory_nodes} - capacity.nodes.keys():
        raise PlacementError(f"{action_on(need, 'keep')}: there is no node {cpuset_text(unknown)}")
    if placement.exclusive:
        if lost := set(placement.vcpu_cpus) - capacity.free:
            raise PlacementError(f"{action_on(need, 'keep')}: not free any more: CPU {cpuset_text(lost)}")
        if not capacity.shared - set(placement.vcpu_cpus):
            raise PlacementError(f"{action_on(need, 'keep')}: no CPU would be left to share")
    return _add(before, need, placement)


def with_others(assignments: Assignments, others: Iterable[Other]) -> Assignments:
    """`others` are the containers outside our VMs; shared VMs use the CPUs that remain shared."""
    return _with_shared_cpus(replace(assignments, others={other.container_id: other for other in others}))


def shared_cpus(assignments: Assignments) -> tuple[int, ...]:
    """The online CPUs that are neither exclusive nor isolated, in ascending order. All others run on them."""
    return tuple(sorted(Capacity(assignments).shared))


def _add(assignments: Assignments, need: PlacementRequest, placement: Placement) -> Assignments:
    return _with_shared_cpus(
        replace(
            assignments,
            needs={**assignments.needs, need.sandbox_id: need},
            placements={**assignments.placements, need.sandbox_id: placement},
        )
    )


def _with_shared_cpus(assignments: Assignments) -> Assignments:
    """All placements use the shared CPUs as they are now."""
    capacity = Capacity(assignments)
    pools = {nodes: capacity.shared_of(nodes) for nodes in {each.cpu_nodes for each in assignments.placements.values()}}
    settled = {}
    for sandbox_id, placement in assignments.placements.items():
        pool = pools[placement.cpu_nodes]
        cpus = placement.vcpu_cpus if placement.exclusive else pool
        settled[sandbox_id] = replace(placement, vcpu_cpus=cpus, service_cpus=pool)
    return replace(assignments, placements=settled)
