"""Machines that tests place VMs on, and needs."""

from typing import Any

from pyshim.model.host_facts import Machine, Node
from pyshim.model.units import MIB
from pyshim.node.nri.assignments import PlacementRequest
from pyshim.node.nri.description import Description, machine

TWO_SOCKETS = Description(sockets=2, dies=2, cores=4, threads=2, memory_mib=65536)
"""CPUs 0 to 31: cores 0 to 7 and their siblings 16 to 23 are socket and node 0, and so on; four dies of 8 CPUs."""
SUB_NUMA = Description(sockets=2, nodes=2, dies=1, l3s=2, cores=4, threads=2, memory_mib=32768)
CHIPLETS = Description(sockets=2, l3s=8, cores=4, threads=2, memory_mib=262144)
NO_SMT = Description(sockets=2, l3s=2, cores=8, memory_mib=65536)
SMT_OFF = Description(sockets=2, dies=2, cores=4, threads=2, memory_mib=65536, offline="16-31")
SOME_OFFLINE = Description(sockets=2, dies=2, cores=4, threads=2, memory_mib=65536, offline="2,5,17,20,27-29")
NO_MEMORY_IN_1 = Description(sockets=1, nodes=4, l3s=4, cores=4, threads=2, memory_mib=(32768, 0, 32768, 32768))
ONE_NODE = Description(cores=4, threads=2, memory_mib=16384)

ALL = {
    "2 sockets x 2 dies x SMT": TWO_SOCKETS,
    "2 sockets x 8 L3s x SMT": CHIPLETS,
    "2 sockets, 2 nodes each": SUB_NUMA,
    "4 nodes, one without memory": NO_MEMORY_IN_1,
    "some CPUs offline": SOME_OFFLINE,
    "SMT off": SMT_OFF,
    "no SMT": NO_SMT,
    "one node": ONE_NODE,
}


def with_device_memory(of: Description, size_mib: int) -> Machine:
    """And a last node that has memory and no CPUs, near to all."""
    plain = machine(of)
    last = len(plain.nodes)
    nodes = [Node(id=node.id, memory_bytes=node.memory_bytes, distances=(*node.distances, 11)) for node in plain.nodes]
    nodes.append(Node(id=last, memory_bytes=size_mib * MIB, distances=(*([11] * last), 10)))
    return Machine(cpus=plain.cpus, nodes=tuple(nodes))


def need(sandbox_id: str, vcpus: int, **members: Any) -> PlacementRequest:
    """Of 1 GiB, and exclusive, unless `members` say otherwise."""
    memory_mib = members.pop("memory_mib", 1024)
    asked = {"name": f"default/{sandbox_id}", "exclusive": True, "memory_bytes": memory_mib * MIB, **members}
    return PlacementRequest(sandbox_id=sandbox_id, vcpus=vcpus, **asked)
