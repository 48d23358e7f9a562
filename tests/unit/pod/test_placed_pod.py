"""A pod whose shim asks where its VM is to run: what it asks, what it keeps of the answer, and no answer at all."""

import pytest
from msgspec.structs import replace

from pyshim.model.errors import NotFound, ShimError, Unavailable
from pyshim.model.placement import Need, Placement
from tests.unit.pod.conftest import DOCUMENT, Stack, scenario

_SOCKET = "/run/pyshim/nri.sock"
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


def _asking(stack: Stack, answer: Placement | ShimError = _PLACEMENT, **runtime: object) -> list[tuple[str, Need]]:
    """The configuration names a plugin, which answers so; what it is asked."""
    asked: list[tuple[str, Need]] = []

    async def ask(path: str, need: Need) -> Placement:
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
def test_a_pod_asks_for_cpus_alone_when_it_is_guaranteed_whole_ones(
    annotations: dict[str, str], cgroups_path: str, static: bool, exclusive: bool
) -> None:
    @scenario
    async def body(stack: Stack) -> None:
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

    body()


@scenario
async def test_guest_ram_comes_from_the_placements_nodes(stack: Stack) -> None:
    _asking(stack, replace(_PLACEMENT, memory_nodes=(0, 1)))

    container = await stack.create("c1", ["pause"], annotations={**_SANDBOX, **_TWO_CPUS})

    assert stack.hypervisors[0].config.memory.host_nodes == (0, 1)
    await stack.delete_last(container)


@scenario
async def test_need_and_placement_are_in_the_state(stack: Stack) -> None:
    _asking(stack)

    container = await stack.create("c1", ["pause"], annotations={**_SANDBOX, **_TWO_CPUS})

    saved = stack.records[-1].snapshots[-1].cgroups["Placed"]
    assert isinstance(saved, dict)
    assert tuple(saved["placement"]["vcpu_cpus"]) == (1, 2, 3)
    assert saved["need"]["name"] == "ns/pod"
    await stack.delete_last(container)


def test_without_an_answer_the_vm_boots_unplaced(caplog: pytest.LogCaptureFixture) -> None:
    @scenario
    async def body(stack: Stack) -> None:
        asked = _asking(stack, Unavailable("ask '/run/pyshim/nri.sock' for a placement: no answer within 2 s"))

        container = await stack.create("c1", ["pause"], annotations={**_SANDBOX, **_TWO_CPUS})

        assert len(asked) == 1
        assert "Placed" not in stack.records[-1].snapshots[-1].cgroups
        await stack.delete_last(container)

    body()

    assert "vm is not placed" in caplog.text


def test_a_node_without_a_plugin_is_nothing_to_warn_of(caplog: pytest.LogCaptureFixture) -> None:
    @scenario
    async def body(stack: Stack) -> None:
        asked = _asking(stack, NotFound("ask '/run/pyshim/nri.sock' for a placement: no plugin runs"))
        stack.document = DOCUMENT

        container = await stack.create("c1", ["pause"], annotations={**_SANDBOX, **_TWO_CPUS})

        assert [path for path, _ in asked] == [_SOCKET]
        assert "Placed" not in stack.records[-1].snapshots[-1].cgroups
        await stack.delete_last(container)

    body()

    assert "vm is not placed" not in caplog.text


@scenario
async def test_nobody_is_asked_where_the_configuration_names_nobody(stack: Stack) -> None:
    asked = _asking(stack, placement_socket="")

    container = await stack.create("c1", ["pause"], annotations={**_SANDBOX, **_TWO_CPUS})

    assert asked == []
    await stack.delete_last(container)
