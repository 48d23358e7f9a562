"""The NUMA nodes of guests on machines that are described: when there are several, and what is behind each."""

from typing import Any

import pytest

from pyshim.config.load import build_config
from pyshim.config.sources import Source
from pyshim.model.config import Config
from pyshim.model.errors import InvalidArgument
from pyshim.model.host_facts import Machine
from pyshim.model.sizing import Placement
from pyshim.model.vm import GuestNode
from pyshim.node.nri.assignments import Assignments, place
from pyshim.node.nri.description import Description, machine
from pyshim.resources.sizing.plan.numa import NumaPlan, VmNeeds, guest_memory_nodes, node_text, numa_plan
from tests.fakes.machines import NO_MEMORY_IN_1, ONE_NODE, SOME_OFFLINE, TWO_SOCKETS, need, with_device_memory

FOUR = Description(sockets=4, cores=2, memory_mib=8192)
"""CPUs 0 and 1 are node 0, and so on; 8 GiB each."""
ISOLATED = Description(sockets=2, cores=4, memory_mib=8192, isolated="0,4-5")


def config(*mapping: str, static: bool = True, **hypervisor: Any) -> Config:
    qemu = {"path": "/q", "kernel": "/k", "image": "/i", "virtio_fs_daemon": "/v", "enable_numa": True}
    tables = {
        "hypervisor": {"qemu": {**qemu, "numa_mapping": list(mapping), **hypervisor}},
        "agent": {},
        "runtime": {"static_sandbox_resource_mgmt": static},
    }
    return build_config(Source(path="/etc/c.toml", directory="/etc", document=tables))


def planned(
    of: Description | Machine,
    vcpus: int,
    memory_mib: int,
    *mapping: str,
    near: frozenset[int] = frozenset(),
    placement: Placement | None = None,
    **hypervisor: Any,
) -> NumaPlan:
    there = machine(of) if isinstance(of, Description) else of
    needs = VmNeeds(vcpus=vcpus, memory_mib=memory_mib, near=near)
    return numa_plan(config(*mapping, **hypervisor), there, needs, placement)


def shown(plan: NumaPlan) -> list[tuple[int, int, tuple[int, ...]]]:
    """Of each node: vCPUs, MiB, and where its memory is of."""
    return [(len(node.vcpus), node.memory_mib, node.memory_nodes) for node in plan.nodes]


@pytest.mark.parametrize(
    ("there", "vcpus", "memory_mib", "near", "nodes", "memory_nodes"),
    [
        pytest.param(ONE_NODE, 8, 4096, (), [], (), id="a host of one node"),
        pytest.param(TWO_SOCKETS, 16, 65536, (), [], (), id="fits on any node"),
        pytest.param(TWO_SOCKETS, 17, 1024, (), [(9, 542, (0,)), (8, 482, (1,))], (), id="too many vCPUs for one"),
        pytest.param(TWO_SOCKETS, 2, 65537, (), [(1, 32768, (0,)), (1, 32769, (1,))], (), id="too much memory for one"),
        pytest.param(TWO_SOCKETS, 1, 65537, (), [], (0, 1), id="one vCPU is on one node"),
        pytest.param(TWO_SOCKETS, 4, 4096, (1,), [], (1,), id="near a device"),
        pytest.param(TWO_SOCKETS, 4, 4096, (0, 1), [(2, 2048, (0,)), (2, 2048, (1,))], (), id="near two"),
        pytest.param(TWO_SOCKETS, 20, 4096, (1,), [(10, 2048, (0,)), (10, 2048, (1,))], (), id="too large for it"),
        pytest.param(SOME_OFFLINE, 24, 24, (), [(12, 12, (0,)), (12, 12, (1,))], (), id="some CPUs offline"),
        pytest.param(SOME_OFFLINE, 13, 2600, (), [(6, 1200, (0,)), (7, 1400, (1,))], (), id="one more than node 0 has"),
        pytest.param(
            NO_MEMORY_IN_1, 9, 900, (), [(3, 300, (0,)), (3, 300, (2,)), (3, 300, (3,))], (), id="none without memory"
        ),
        pytest.param(
            with_device_memory(TWO_SOCKETS, 1 << 20), 32, 64, (), [(16, 32, (0,)), (16, 32, (1,))], (), id="nor CPUs"
        ),
        pytest.param(ISOLATED, 6, 600, (), [(4, 400, (0,)), (2, 200, (1,))], (), id="isolated CPUs are not for it"),
    ],
)
def test_a_guest_has_the_nodes_it_needs(
    there: Description | Machine,
    vcpus: int,
    memory_mib: int,
    near: tuple[int, ...],
    nodes: list[Any],
    memory_nodes: tuple[int, ...],
) -> None:
    found = planned(there, vcpus, memory_mib, near=frozenset(near))

    assert (shown(found), found.memory_nodes) == (nodes, memory_nodes), found.why
    if nodes:
        assert sorted(vcpu for node in found.nodes for vcpu in node.vcpus) == list(range(vcpus))
        assert sum(node.memory_mib for node in found.nodes) == memory_mib


@pytest.mark.parametrize(
    ("there", "mapping", "nodes"),
    [
        pytest.param(TWO_SOCKETS, ("0", "1"), [(2, 512, (0,)), (2, 512, (1,))], id="small, as it is written"),
        pytest.param(TWO_SOCKETS, ("1", "0"), [(2, 512, (1,)), (2, 512, (0,))], id="in its order"),
        pytest.param(FOUR, ("0-1", "2,3"), [(2, 512, (0, 1)), (2, 512, (2, 3))], id="groups"),
        pytest.param(FOUR, ("0-2", "3"), [(3, 768, (0, 1, 2)), (1, 256, (3,))], id="by their CPUs"),
        pytest.param(ONE_NODE, ("0", "0"), [(2, 512, (0,)), (2, 512, (0,))], id="two on the same"),
        pytest.param(NO_MEMORY_IN_1, ("0-1", "2"), [(3, 768, (0,)), (1, 256, (2,))], id="memory where there is some"),
    ],
)
def test_a_mapping_is_taken_as_it_is(there: Description, mapping: tuple[str, ...], nodes: list[Any]) -> None:
    found = planned(there, 4, 1024, *mapping)

    assert shown(found) == nodes, found.why
    assert found.why.endswith("as numa_mapping says")


def test_one_entry_binds_the_memory_of_a_guest_with_one_node() -> None:
    found = planned(FOUR, 4, 1024, "2-3")

    assert (found.nodes, found.memory_nodes) == ((), (2, 3))


def test_distances_are_the_hosts_and_between_what_is_nearest() -> None:
    rows = ((10, 12, 40, 255), (12, 10, 33, 40), (40, 33, 10, 11), (255, 40, 11, 10))
    there = Description(sockets=4, cores=2, memory_mib=8192, distances=rows)

    assert [node.distances for node in planned(there, 4, 1024, "0-1", "2").nodes] == [(10, 33), (33, 10)]
    assert [node.distances for node in planned(there, 4, 1024, "0", "3").nodes] == [(10, 254), (254, 10)]
    assert [node.distances for node in planned(there, 4, 1024, "2", "2").nodes] == [(10, 11), (11, 10)]


def test_huge_pages_are_not_split() -> None:
    found = planned(TWO_SOCKETS, 3, 1026, "0", "1", enable_hugepages=True)

    assert shown(found) == [(2, 684, (0,)), (1, 342, (1,))]


@pytest.mark.parametrize(
    ("mapping", "hypervisor", "said"),
    [
        (("0", "2"), {}, r"read numa_mapping in '/etc/c.toml': the host has no node 2"),
        (("0", "one"), {}, r"read numa_mapping in '/etc/c.toml': not a list of CPUs below 8192: 'one'"),
        (("0", ""), {}, r"read numa_mapping in '/etc/c.toml': '' has no CPUs"),
        (("0", "1"), {"static": False}, r"read enable_numa in '/etc/c.toml': a VM with NUMA nodes keeps the size"),
        ((), {"static": False}, r"read enable_numa in '/etc/c.toml': a VM with NUMA nodes keeps the size"),
        (("0", "1"), {"machine_type": "microvm"}, r"read enable_numa in '/etc/c.toml': microvm has no NUMA nodes"),
    ],
)
def test_what_cannot_be_is_refused_by_its_key(mapping: tuple[str, ...], hypervisor: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        planned(TWO_SOCKETS, 4, 1024, *mapping, **hypervisor)


def test_a_host_of_one_node_takes_a_file_that_changes_sizes() -> None:
    assert planned(ONE_NODE, 4, 1024, static=False).nodes == ()


def test_a_node_without_memory_is_no_home() -> None:
    with pytest.raises(InvalidArgument, match=r"'1' has no memory"):
        planned(NO_MEMORY_IN_1, 4, 1024, "0", "1")


@pytest.mark.parametrize(
    ("vcpus", "memory_mib", "hypervisor", "why"),
    [
        (4, 1024, {"confidential_guest": True}, "one node: confidential guest; 2 on the host: as numa_mapping says"),
        (1, 1024, {}, "one node: 1 vCPUs for 2 nodes, as numa_mapping says"),
        (4, 2, {"enable_hugepages": True}, "one node: 2 MiB are too few, as numa_mapping says"),
    ],
)
def test_a_guest_that_cannot_have_several_keeps_their_memory(
    vcpus: int, memory_mib: int, hypervisor: dict[str, Any], why: str
) -> None:
    found = planned(TWO_SOCKETS, vcpus, memory_mib, "0", "1", **hypervisor)

    assert found == NumaPlan(memory_nodes=(0, 1), why=why)


def _placed(of: Description, vcpus: int, *, exclusive: bool = True, memory_mib: int = 1024) -> Placement:
    wants = need("s", vcpus, exclusive=exclusive, memory_mib=memory_mib)
    return place(Assignments(machine=machine(of), reserved=()), wants).placements["s"]


def test_nodes_follow_the_placement_and_not_the_mapping() -> None:
    placement = _placed(TWO_SOCKETS, 20)

    found = planned(TWO_SOCKETS, 20, 2000, "0", placement=placement)

    assert found.why == "2 nodes, as the VM is placed, not as numa_mapping says"
    homes = {cpu.id: cpu.node for cpu in machine(TWO_SOCKETS).cpus}
    for node, host_node in zip(found.nodes, (0, 1), strict=True):
        assert node.memory_nodes == (host_node,)
        assert node.memory_mib == 100 * len(node.vcpus)
        assert node.cpus == tuple(placement.vcpu_cpus[vcpu] for vcpu in node.vcpus)
        assert {homes[cpu] for cpu in node.cpus} == {host_node}
    assert sorted(vcpu for node in found.nodes for vcpu in node.vcpus) == list(range(20))


def test_a_vm_placed_on_one_node_has_one() -> None:
    found = planned(TWO_SOCKETS, 8, 1024, placement=_placed(TWO_SOCKETS, 8))

    assert (found.nodes, found.memory_nodes) == ((), ())


def test_vcpus_on_shared_cpus_of_two_nodes_are_dealt_out() -> None:
    found = planned(FOUR, 4, 1024, placement=_placed(FOUR, 4, exclusive=False))

    assert [(node.vcpus, node.cpus) for node in found.nodes] == [((0, 1), (0, 1)), ((2, 3), (2, 3))]


def test_memory_of_a_node_that_has_none_is_the_nearest() -> None:
    placement = Placement(
        vcpu_cpus=(0, 4), service_cpus=(1,), cpu_nodes=(0, 1), memory_nodes=(), exclusive=True, why="by request"
    )

    found = planned(NO_MEMORY_IN_1, 2, 1024, placement=placement)

    assert [(node.vcpus, node.memory_nodes) for node in found.nodes] == [((0,), (0,)), ((1,), (0,))]


NODES = (
    GuestNode(vcpus=(0, 1), memory_mib=512, distances=(10, 21), memory_nodes=(2, 3), cpus=(4, 5, 6, 7)),
    GuestNode(vcpus=(2,), memory_mib=256, distances=(21, 10), memory_nodes=(0,), cpus=(0, 1)),
)


@pytest.mark.parametrize(("host", "guest"), [("0", "1"), ("3", "0"), ("0-3", "0-1"), ("1", ""), ("", ""), ("2-3", "0")])
def test_memory_nodes_have_the_guests_numbers(host: str, guest: str) -> None:
    assert guest_memory_nodes(host, NODES) == guest


def test_a_node_in_words() -> None:
    assert node_text(NODES[0]) == "vCPUs 0-1 on CPUs 4-7, 512 MiB of host node 2-3"
