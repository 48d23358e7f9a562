"""The NUMA nodes a guest has, and which of the host's CPUs and memory are behind each.

A guest has one node unless the configuration has `enable_numa` and the VM is on several nodes of the host. Which ones:

1. those of the placement that the node's plugin gave;
2. else those of `numa_mapping`, as they are written;
3. else those where the kubelet keeps memory for the pod, or where its devices are, as long as they suffice;
4. else all with CPUs and memory, for a VM that does not fit on the smallest of them. One that does has one node.

Keys and order are those of Kata's Go runtime, which has no placement and takes the first node in the last case.
"""

from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import partial
from itertools import accumulate, pairwise

import msgspec

from pyshim.model.config import Config
from pyshim.model.errors import InvalidArgument
from pyshim.model.host_facts import Machine, cpu_set, cpuset_text
from pyshim.model.sizing import Placement
from pyshim.model.units import MIB
from pyshim.model.vm import GuestNode
from pyshim.resources.sizing.plan.static import is_resizable, memory_unit_mib

_LOCAL, _NEAREST, _FARTHEST = 10, 11, 254
"""ACPI's distances: of a node to itself, and the limits to another one. 255 means unreachable."""


class VmNeeds(msgspec.Struct, frozen=True, kw_only=True):
    vcpus: int
    memory_mib: int
    near: frozenset[int]
    """The host's nodes with the memory, or else the devices, that were allocated to the pod."""


class NumaPlan(msgspec.Struct, frozen=True, kw_only=True):
    nodes: tuple[GuestNode, ...] = ()
    """Empty: the guest has one."""
    memory_nodes: tuple[int, ...] = ()
    """Without `nodes`: the host's nodes that guest RAM comes from; empty: the kernel decides."""
    why: str
    """One line for people."""


class _Home(msgspec.Struct, frozen=True, kw_only=True):
    """The host's CPUs and memory behind one node of the guest."""

    cpus: tuple[int, ...]
    memory_nodes: tuple[int, ...]
    vcpus: tuple[int, ...] = ()
    """The vCPUs placed here; empty if `_dealt` distributes them."""
    share: int
    """The number of the VM's CPUs here, by which `_dealt` distributes vCPUs."""


def numa_plan(config: Config, machine: Machine, needs: VmNeeds, placement: Placement | None) -> NumaPlan:
    """Raises InvalidArgument naming the key for a mapping that this host does not have, and for a VM that is to have
    several nodes and to change its size.
    """
    mapping = _mapping(config, machine)
    if placement is not None:
        homes, why = _homes_of_placement(machine, placement), "as the VM is placed"
        why += ", not as numa_mapping says" if mapping else ""
    elif mapping:
        homes, why = [_home(machine, nodes) for nodes in mapping], "as numa_mapping says"
    else:
        homes, why = _homes_that_fit(machine, needs)
    if _is_spread(machine) or len(mapping) > 1:
        _check(config)
    if len(homes) < 2:
        memory_nodes = homes[0].memory_nodes if homes and placement is None else ()
        return NumaPlan(memory_nodes=memory_nodes, why=f"one node: {why}")
    memory_nodes = tuple(sorted({node for home in homes for node in home.memory_nodes})) if placement is None else ()
    if config.hypervisor.confidential_guest:
        # QEMU ends as the guest converts pages across two memory regions, unless it is patched.
        return NumaPlan(memory_nodes=memory_nodes, why=f"one node: confidential guest; {len(homes)} on the host: {why}")
    if needs.vcpus < len(homes):
        return NumaPlan(memory_nodes=memory_nodes, why=f"one node: {needs.vcpus} vCPUs for {len(homes)} nodes, {why}")
    nodes = _guest_nodes(config, machine, homes, needs)
    if not all(node.memory_mib for node in nodes):
        return NumaPlan(memory_nodes=memory_nodes, why=f"one node: {needs.memory_mib} MiB are too few, {why}")
    return NumaPlan(nodes=nodes, why=f"{len(homes)} nodes, {why}")


def node_text(node: GuestNode) -> str:
    """For people."""
    vcpus, nodes, cpus = map(cpuset_text, (node.vcpus, node.memory_nodes, node.cpus))
    return f"vCPUs {vcpus} on CPUs {cpus}, {node.memory_mib} MiB of host node {nodes}"


def guest_memory_nodes(host_nodes: str, nodes: Sequence[GuestNode]) -> str:
    """The guest's nodes whose memory is of these nodes of the host, both as `cpuset.mems` is written; empty for none.

    Raises InvalidArgument for a malformed list.
    """
    wanted = cpu_set(host_nodes, "cpuset.mems")
    return cpuset_text(number for number, node in enumerate(nodes) if wanted & {*node.memory_nodes})


def _check(config: Config) -> None:
    where = f"in {config.origin('enable_numa')}"
    if is_resizable(config):
        raise InvalidArgument(
            f"read enable_numa {where}: a VM with NUMA nodes keeps the size it boots with"
            " (hint: static_sandbox_resource_mgmt = true)"
        )
    if not config.hypervisor.machine.is_pci:
        raise InvalidArgument(f"read enable_numa {where}: {config.hypervisor.machine_type} has no NUMA nodes")


def _mapping(config: Config, machine: Machine) -> list[frozenset[int]]:
    known = {node.id for node in machine.nodes}
    found = []
    for text in config.hypervisor.numa_mapping:
        where = f"numa_mapping in {config.origin('numa_mapping')}"
        nodes = cpu_set(text, where)
        if unknown := nodes - known:
            raise InvalidArgument(f"read {where}: the host has no node {cpuset_text(unknown)}")
        home = _home(machine, nodes)
        for missing, there in (("CPUs", home.cpus), ("memory", home.memory_nodes)):
            if not there:
                raise InvalidArgument(f"read {where}: {text!r} has no {missing}")
        found.append(nodes)
    return found


def _home(machine: Machine, nodes: frozenset[int]) -> _Home:
    cpus = _cpus(machine, nodes)
    return _Home(
        cpus=cpus,
        share=len(cpus),
        memory_nodes=tuple(node.id for node in machine.nodes if node.id in nodes and node.memory_bytes),
    )


def _cpus(machine: Machine, nodes: frozenset[int]) -> tuple[int, ...]:
    return tuple(cpu.id for cpu in machine.cpus if cpu.online and cpu.node in nodes and not cpu.isolated)


def _is_spread(machine: Machine) -> bool:
    return sum(1 for node in machine.nodes if _cpus(machine, frozenset({node.id}))) > 1


def _homes_of_placement(machine: Machine, placement: Placement) -> list[_Home]:
    """A node of the guest for each that vCPUs were placed on."""
    node_of = {cpu.id: cpu.node for cpu in machine.cpus if cpu.online}
    with_memory = [node.id for node in machine.nodes if node.memory_bytes]
    allowed = [node for node in with_memory if node in placement.memory_nodes] or with_memory
    homes = []
    for number in sorted({node_of[cpu] for cpu in placement.vcpu_cpus if cpu in node_of}):
        nearest = min(allowed, key=partial(_host_distance, machine, number))
        here = {vcpu: cpu for vcpu, cpu in enumerate(placement.vcpu_cpus) if node_of.get(cpu) == number}
        homes.append(
            _Home(
                # The set of shared CPUs changes, their node does not.
                cpus=tuple(here.values()) if placement.exclusive else _cpus(machine, frozenset({number})),
                memory_nodes=(nearest,),
                vcpus=tuple(here) if placement.exclusive else (),
                share=len(here),
            )
        )
    return homes


def _homes_that_fit(machine: Machine, needs: VmNeeds) -> tuple[list[_Home], str]:
    homes = {node.id: _home(machine, frozenset({node.id})) for node in machine.nodes}
    usable = {number: home for number, home in homes.items() if home.cpus and home.memory_nodes}
    near = {number: home for number, home in usable.items() if number in needs.near}
    if near and _suffice(machine, near.values(), needs):
        return list(near.values()), f"where the pod's memory or devices are, host node {cpuset_text(near)}"
    if not near and all(_suffice(machine, [home], needs) for home in usable.values()):
        return [], "the VM fits on any of the host's"
    return list(usable.values()), "as on the host"


def _suffice(machine: Machine, homes: Iterable[_Home], needs: VmNeeds) -> bool:
    homes = list(homes)
    behind = {node for home in homes for node in home.memory_nodes}
    memory_bytes = sum(node.memory_bytes for node in machine.nodes if node.id in behind)
    return sum(len(home.cpus) for home in homes) >= needs.vcpus and memory_bytes >= needs.memory_mib * MIB


def _guest_nodes(config: Config, machine: Machine, homes: Sequence[_Home], needs: VmNeeds) -> tuple[GuestNode, ...]:
    """The guest's nodes; memory is divided by vCPUs, in whole pages."""
    vcpus = _dealt(homes, needs.vcpus)
    unit_mib = memory_unit_mib(config.hypervisor)
    units = needs.memory_mib // unit_mib
    ends = [units * done // needs.vcpus for done in accumulate((len(each) for each in vcpus), initial=0)]
    return tuple(
        GuestNode(
            vcpus=numbers,
            memory_mib=(end - start) * unit_mib,
            distances=tuple(_LOCAL if to is home else _distance(machine, home, to) for to in homes),
            memory_nodes=home.memory_nodes,
            cpus=home.cpus,
        )
        for home, numbers, (start, end) in zip(homes, vcpus, pairwise(ends), strict=True)
    )


def _dealt(homes: Sequence[_Home], vcpus: int) -> list[tuple[int, ...]]:
    """The vCPUs of each home: the placed ones; else one each, in order, and the rest by shares."""
    if sum(len(home.vcpus) for home in homes) == vcpus:
        return [home.vcpus for home in homes]
    counts = [1] * len(homes)
    for _ in range(vcpus - len(homes)):
        counts[max(range(len(homes)), key=lambda at: Fraction(homes[at].share, counts[at] + 1))] += 1
    return [tuple(range(start, end)) for start, end in pairwise(accumulate(counts, initial=0))]


def _distance(machine: Machine, home: _Home, to: _Home) -> int:
    """The distance between the nearest memory nodes of both, at least _NEAREST: they are two nodes of the guest."""
    nearest = min(_host_distance(machine, one, other) for one in home.memory_nodes for other in to.memory_nodes)
    return min(max(nearest, _NEAREST), _FARTHEST)


def _host_distance(machine: Machine, one: int, other: int) -> int:
    at = {node.id: index for index, node in enumerate(machine.nodes)}
    return machine.nodes[at[one]].distances[at[other]]
