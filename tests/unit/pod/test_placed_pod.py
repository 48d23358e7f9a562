"""A pod whose shim asks where its VM is to run: what it asks, what it keeps of the answer, and no answer at all."""

import pytest
from msgspec.structs import replace

from pyshim.model.errors import FailedPrecondition, InvalidArgument, NotFound, ShimError, Unavailable
from pyshim.model.host_facts import MachineError
from pyshim.model.sizing import Placement, PlacementRequest
from pyshim.node.nri.description import Description, machine
from tests.unit.pod.conftest import DOCUMENT, Stack

_SOCKET = "/run/pyshim/nri/placement.sock"
_SANDBOX = {
    "io.kubernetes.cri.container-type": "sandbox",
    "io.kubernetes.cri.sandbox-id": "c1",
    "io.kubernetes.cri.sandbox-name": "pod",
    "io.kubernetes.cri.sandbox-namespace": "ns",
}
_TWO_CPUS = {
    "io.kubernetes.cri.sandbox-cpu-quota": "200000",
    "io.kubernetes.cri.sandbox-cpu-period": "100000",
    "io.kubernetes.cri.sandbox-cpu-shares": "2048",
}
_PLACEMENT = Placement(
    vcpu_cpus=(1, 2, 3), service_cpus=(0,), cpu_nodes=(0,), memory_nodes=(0,), exclusive=True, why="there is room"
)


def _asking(
    stack: Stack, answer: Placement | ShimError = _PLACEMENT, **runtime: object
) -> list[tuple[str, PlacementRequest]]:
    """The configuration names a plugin, which answers so. Returns the requests that it gets."""
    asked: list[tuple[str, PlacementRequest]] = []

    async def ask(path: str, need: PlacementRequest) -> Placement:
        asked.append((path, need))
        if isinstance(answer, ShimError):
            raise answer
        return answer

    stack.ask_placement = ask
    stack.document = {**DOCUMENT, "runtime": {"placement_socket": _SOCKET, **runtime}}
    return asked


@pytest.mark.parametrize(
    ("annotations", "cgroups_path", "static", "exclusive"),
    [
        (_TWO_CPUS, "/kubepods/pod1/c1", True, True),
        (_TWO_CPUS, "/kubepods/burstable/pod1/c1", True, False),
        (_TWO_CPUS, "kubepods-besteffort-pod1.slice:cri-containerd:c1", True, False),
        (_TWO_CPUS, "/kubepods/pod1/c1", False, False),
        ({**_TWO_CPUS, "io.kubernetes.cri.sandbox-cpu-quota": "150000"}, "/kubepods/pod1/c1", True, False),
        ({**_TWO_CPUS, "io.kubernetes.cri.sandbox-cpu-shares": "1024"}, "/kubepods/pod1/c1", True, False),
        ({}, "/kubepods/pod1/c1", True, False),
    ],
    ids=["Guaranteed", "Burstable", "BestEffort", "size follows containers", "one and a half", "requests", "no limit"],
)
async def test_a_pod_asks_for_cpus_alone_when_it_is_guaranteed_whole_ones(
    annotations: dict[str, str], cgroups_path: str, static: bool, exclusive: bool, stack: Stack
) -> None:
    asked = _asking(stack, static_sandbox_resource_mgmt=static)

    container = await stack.create(
        "c1", ["pause"], annotations={**_SANDBOX, **annotations}, linux={"cgroupsPath": cgroups_path}
    )

    ((path, need),) = asked
    vm = stack.hypervisors[0].config
    assert (path, need.sandbox_id, need.name) == (_SOCKET, "c1", "ns/pod")
    assert (need.vcpus, need.memory_bytes) == (vm.cpu.boot_vcpus, vm.memory.boot_mib << 20)
    assert need.exclusive == exclusive
    await stack.delete_last(container)


async def test_a_placement_gives_the_nodes_of_guest_ram_and_is_in_the_state_with_its_need(stack: Stack) -> None:
    _asking(stack, replace(_PLACEMENT, memory_nodes=(0, 1)))

    container = await stack.create("c1", ["pause"], annotations={**_SANDBOX, **_TWO_CPUS})

    assert stack.hypervisors[0].config.memory.host_nodes == (0, 1)
    saved = stack.records[-1].snapshots[-1].cgroups["Placed"]
    assert isinstance(saved, dict)
    assert tuple(saved["placement"]["vcpu_cpus"]) == (1, 2, 3)
    assert saved["need"]["name"] == "ns/pod"
    await stack.delete_last(container)


async def test_without_an_answer_the_vm_boots_unplaced(caplog: pytest.LogCaptureFixture, stack: Stack) -> None:
    asked = _asking(stack, Unavailable(f"ask '{_SOCKET}' for a placement: no answer within 2 s"))

    container = await stack.create("c1", ["pause"], annotations={**_SANDBOX, **_TWO_CPUS})

    assert len(asked) == 1
    assert "Placed" not in stack.records[-1].snapshots[-1].cgroups
    await stack.delete_last(container)

    assert "vm is not placed" in caplog.text


async def test_a_node_without_a_plugin_gives_no_warning(caplog: pytest.LogCaptureFixture, stack: Stack) -> None:
    asked = _asking(stack, NotFound("ask '/run/pyshim/nri/placement.sock' for a placement: no plugin runs"))
    stack.document = DOCUMENT

    container = await stack.create("c1", ["pause"], annotations={**_SANDBOX, **_TWO_CPUS})

    assert [path for path, _ in asked] == [_SOCKET]
    assert "Placed" not in stack.records[-1].snapshots[-1].cgroups
    await stack.delete_last(container)

    assert "vm is not placed" not in caplog.text


async def test_no_plugin_is_called_unless_the_configuration_names_one(stack: Stack) -> None:
    asked = _asking(stack, placement_socket="")

    container = await stack.create("c1", ["pause"], annotations={**_SANDBOX, **_TWO_CPUS})

    assert asked == []
    await stack.delete_last(container)


_TWO_NODES = Description(sockets=2, cores=2, memory_mib=65536)


def _with_nodes(stack: Stack, *mapping: str, **hypervisor: object) -> None:
    """The configuration enables NUMA; the host has two nodes, with CPUs 0 and 1, and 2 and 3."""
    stack.machine = machine(_TWO_NODES)
    qemu = {**DOCUMENT["hypervisor"]["qemu"], "enable_numa": True, "numa_mapping": list(mapping), **hypervisor}
    stack.document = {
        **DOCUMENT,
        "hypervisor": {"qemu": qemu},
        "runtime": {"static_sandbox_resource_mgmt": True, "placement_socket": _SOCKET},
    }


async def test_the_guests_nodes_are_those_of_the_placement(stack: Stack) -> None:
    _asking(stack, replace(_PLACEMENT, cpu_nodes=(0, 1), memory_nodes=(0, 1)))
    _with_nodes(stack)

    container = await stack.create("c1", ["pause"], annotations={**_SANDBOX, **_TWO_CPUS})

    vm = stack.hypervisors[0].config
    assert [(node.vcpus, node.cpus, node.memory_nodes) for node in vm.numa] == [
        ((0,), (1,), (0,)),
        ((1, 2), (2, 3), (1,)),
    ]
    assert sum(node.memory_mib for node in vm.numa) == vm.memory.boot_mib
    saved = stack.records[-1].snapshots[-1].cgroups["Numa"]
    assert isinstance(saved, dict)
    assert saved["Why"] == "2 nodes, as the VM is placed"
    await stack.delete_last(container)


async def test_a_containers_memory_nodes_have_the_guests_numbers(stack: Stack) -> None:
    _with_nodes(stack, "1", "0", default_vcpus=2)
    stack.host.cgroup_tree.sets["mems"] = "0-1"
    resources = {"cpu": {"shares": 512, "cpus": "0-1", "mems": "1"}}

    container = await stack.create("c1", ["true"], linux={"resources": resources})
    created = stack.agent.containers["c1"].OCI.Linux.Resources.CPU
    await stack.pod.update(container, {"cpu": {"mems": "0"}})

    assert (created.Mems, created.Cpus) == ("0", "")
    assert stack.agent.updates[-1].resources.CPU.Mems == "1"
    await stack.delete_last(container)


async def test_a_machine_that_cannot_be_read_leaves_the_guest_one_node(
    caplog: pytest.LogCaptureFixture, stack: Stack
) -> None:
    _with_nodes(stack, "0", "1")
    stack.machine = MachineError("read 'cpu/online': it is missing")

    container = await stack.create("c1", ["pause"], annotations={**_SANDBOX, **_TWO_CPUS})

    assert stack.hypervisors[0].config.numa == ()
    await stack.delete_last(container)

    assert "guest has one NUMA node" in caplog.text


async def test_a_mapping_of_another_host_is_refused_and_leaves_nothing(stack: Stack) -> None:
    _with_nodes(stack, "0", "7")

    with pytest.raises(InvalidArgument, match=r"numa_mapping in .*: the host has no node 7"):
        await stack.create("c1", ["pause"], annotations={**_SANDBOX, **_TWO_CPUS})

    assert stack.hypervisors == []


async def test_a_container_of_another_class_is_refused_and_the_pod_goes_on(stack: Stack) -> None:
    gold, silver = ({"intelRdt": {"closID": name}} for name in ("gold", "silver"))
    pod = await stack.create("c1", ["pause"], annotations=_SANDBOX, linux=gold)
    member = {"io.kubernetes.cri.container-type": "container", "io.kubernetes.cri.sandbox-id": "c1"}
    one = await stack.create("one", ["true"], annotations=member, linux=gold)

    with pytest.raises(FailedPrecondition, match="join RDT class 'silver'"):
        await stack.create("two", ["true"], annotations=member, linux=silver)

    assert [name for name, _ in stack.host.cgroup_tree.classes] == ["gold"]
    assert set(stack.agent.containers) == {"one"}
    await stack.pod.delete(one, None)
    await stack.delete_last(pod)
    assert stack.left() == {}
