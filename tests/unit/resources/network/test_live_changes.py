"""Interfaces that come and go while a pod runs: what VM and guest are asked, and what is left when that fails."""

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from pyshim.model.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, ShimError
from pyshim.model.ids import ContainerId
from pyshim.resources.network import changes as network_changes
from pyshim.resources.network.plan.network import HostsNetwork
from pyshim.ttrpc import Code
from tests.fakes.network import FakeNetwork, interface, mac
from tests.unit.pod.conftest import DOCUMENT, Stack, until

NETWORK: dict[str, Any] = {"linux": {"namespaces": [{"type": "network", "path": "/run/netns/pod"}]}}


async def started(stack: Stack, **hypervisor: Any) -> FakeNetwork:
    qemu = {**DOCUMENT["hypervisor"]["qemu"], **hypervisor}
    stack.document = {**stack.document, "hypervisor": {"qemu": qemu}}
    await stack.run("c1", ["sleep"], **NETWORK)
    return stack.networks.network


async def looked(network: FakeNetwork, looks: int = 2) -> None:
    """The change is through: the agent gets no further call."""
    await until(lambda: network.looks == looks)
    await asyncio.sleep(1)


def configured(stack: Stack) -> list[tuple[str, str]]:
    """(interface, its place) of everything said since the VM came up."""
    return [(item.name, item.devicePath) for item in stack.agent.interfaces]


async def test_an_interface_that_comes_is_plugged_and_told_with_its_place_and_all_routes(stack: Stack) -> None:
    network = await started(stack)

    network.add("eth1", "eth2")
    await looked(network)

    assert list(stack.hypervisors[0].plugged) == ["network-1", "network-2"]
    assert configured(stack) == [("eth0", ""), ("eth1", "02/01"), ("eth2", "02/02")]
    # kata-agent's table is the last one sent, so nothing may be missing from it.
    assert [[item.device for item in routes] for routes in stack.agent.routes] == [["eth0"], ["eth0", "eth1", "eth2"]]
    assert [item.device for item in stack.agent.neighbours] == ["eth0", "eth1", "eth2"]
    assert network.open == set()
    (snapshot,) = {len(records.snapshots[-1].endpoints) for records in stack.records}
    assert snapshot == 3


async def test_an_interface_that_goes_is_unplugged_before_its_tap_is_dropped(stack: Stack) -> None:
    network = await started(stack)
    network.add("eth1")
    await looked(network)
    vm = stack.hypervisors[0]
    vm.may_unplug.clear()
    network.take("eth1")
    await until(lambda: network.looks == 3)
    assert network.wired == {"network-0", "network-1"}

    vm.may_unplug.set()
    await until(lambda: network.wired == {"network-0"})

    assert vm.plugged == {}


def resist(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The guest lets go of nothing; what it was asked to let go of, and the interface that it had got last."""
    asked: list[tuple[str, str]] = []

    async def unplug(device_id: str) -> None:
        asked.append((device_id, configured(stack)[-1][0]))
        raise DeadlineExceeded(f"unplug {device_id!r}: the guest did not let go")

    monkeypatch.setattr(stack.hypervisors[0], "unplug", unplug)
    return asked


async def test_an_interface_the_guest_keeps_is_asked_for_again_and_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, stack: Stack
) -> None:
    network = await started(stack)
    network.add("eth1", "eth2")
    await looked(network)
    with monkeypatch.context() as patch:
        asked = resist(stack, patch)
        network.take("eth1")
        await asyncio.sleep(2 * sum(network_changes.RETRIES_S))
        assert [device for device, _ in asked] == ["network-1"] * (1 + len(network_changes.RETRIES_S))
        assert network.wired == {"network-0", "network-1", "network-2"}, "qemu still has its tap"

    network.add("eth3")
    await until(lambda: network.wired == {"network-0", "network-2", "network-3"})

    assert list(stack.hypervisors[0].plugged) == ["network-2", "network-3"]


async def test_an_interface_the_guest_keeps_holds_up_neither_a_new_one_nor_the_end_of_the_pod(
    monkeypatch: pytest.MonkeyPatch, stack: Stack
) -> None:
    network = await started(stack)
    network.add("eth1")
    await looked(network)
    asked = resist(stack, monkeypatch)
    network.take("eth1")
    await until(lambda: asked)
    network.add("eth2")
    await until(lambda: len(asked) > 1)
    assert asked[:2] == [("network-1", "eth1"), ("network-1", "eth2")], "the new one comes first"

    await stack.pod.close()

    assert network.wired == set()


async def test_an_interface_the_vm_was_made_with_stays_without_its_link_and_its_successor_is_plugged(
    stack: Stack,
) -> None:
    network = await started(stack)

    network.take("eth0")
    network.add("eth1")
    await looked(network)

    assert list(stack.hypervisors[0].plugged) == ["network-1"]
    assert network.wired == {"network-0", "network-1"}


async def test_an_interface_the_vm_cannot_take_leaves_nothing_and_the_next_one_is_taken(stack: Stack) -> None:
    network = await started(stack)
    stack.host.faults.plan({"plug": 1})
    network.add("eth1")
    await looked(network)
    assert (network.wired, network.open) == ({"network-0"}, set())
    assert configured(stack) == [("eth0", "")]

    network.add("eth2")
    await looked(network, 3)

    assert configured(stack) == [("eth0", ""), ("eth1", "02/01"), ("eth2", "02/02")]


async def test_a_look_that_fails_is_tried_again_and_not_for_ever(stack: Stack) -> None:
    network = await started(stack)
    network.failing_looks = 1
    network.add("eth1")
    await looked(network, 3)
    assert list(stack.hypervisors[0].plugged) == ["network-1"]

    network.failing_looks = 100
    network.add("eth2")
    await asyncio.sleep(40)

    assert network.looks == 3 + 1 + len(network_changes.RETRIES_S)


async def test_an_interface_that_leaves_something_on_the_host_keeps_no_other_out(stack: Stack) -> None:
    network = await started(stack)
    network.add("eth1")
    await looked(network)
    network.undroppable.add("network-1")

    network.take("eth1")
    network.add("eth2")
    await looked(network, 3)

    assert list(stack.hypervisors[0].plugged) == ["network-2"]
    assert configured(stack)[-1] == ("eth2", stack.agent.interfaces[-1].devicePath)
    assert network.wired == {"network-0", "network-1", "network-2"}


async def test_an_interface_the_guest_refuses_leaves_the_vm_and_the_host(stack: Stack) -> None:
    network = await started(stack)
    stack.agent.failures["UpdateInterface"] = (Code.PERMISSION_DENIED, "policy")

    network.add("eth1")
    await looked(network)

    assert stack.hypervisors[0].plugged == {}
    assert network.wired == {"network-0"}
    assert [[item.device for item in routes] for routes in stack.agent.routes] == [["eth0"]]


async def test_an_interface_that_changes_is_told_again_and_nothing_else(stack: Stack) -> None:
    network = await started(stack)
    network.add("eth1")
    await looked(network)
    calls = len(stack.agent.calls)

    bigger = replace(interface("eth1"), mtu=9000)
    original = network._tell

    def tell(names: list[str]) -> None:
        original(names)
        network.interfaces = (interface("eth0"), bigger)

    network._tell = tell  # type: ignore[method-assign]
    network.add()
    await looked(network, 3)

    assert stack.agent.calls[calls:] == ["UpdateInterface"]
    assert (stack.agent.interfaces[-1].hwAddr, stack.agent.interfaces[-1].mtu) == (mac("eth1"), 9000)
    assert stack.agent.interfaces[-1].devicePath == "02/01"


async def test_many_changes_at_once_are_one_look_and_no_change_is_none(stack: Stack) -> None:
    network = await started(stack)
    for number in range(1, 6):
        network.add(f"eth{number}")
        await asyncio.sleep(network_changes.SETTLE_S / 10)
    await looked(network)

    await asyncio.sleep(30)

    assert network.looks == 2


async def test_a_vm_that_takes_no_devices_watches_nothing(stack: Stack) -> None:
    network = await started(stack, machine_type="microvm")

    assert not network.is_watched


async def test_the_end_of_the_pod_does_not_wait_for_a_change_under_way(stack: Stack) -> None:
    network = await started(stack)
    stack.agent.hung.add("UpdateInterface")
    network.add("eth1")
    await until(lambda: stack.agent.calls.count("UpdateInterface") == 2)

    await stack.pod.close()

    assert network.wired == set()


@pytest.mark.parametrize(("asked", "queues"), [(0, 3), (1, 1), (7, 7)])
async def test_an_interface_has_the_queues_asked_for_or_one_for_each_vcpu(
    asked: int, queues: int, stack: Stack
) -> None:
    await started(stack, network_queues=asked, default_vcpus=3)

    assert stack.networks.queues == queues


async def test_the_none_model_leaves_the_namespace_alone(stack: Stack) -> None:
    stack.document = {**stack.document, "runtime": {"internetworking_model": "none"}}

    network = await started(stack)

    assert (network.looks, configured(stack)) == (0, [])


# ---- a namespace of the shim's own: the caller adds interfaces between Create and Start

PATHLESS: dict[str, Any] = {"linux": {"namespaces": [{"type": "network"}]}}


async def created(stack: Stack, **hypervisor: Any) -> FakeNetwork:
    qemu = {**DOCUMENT["hypervisor"]["qemu"], **hypervisor}
    stack.document = {**stack.document, "hypervisor": {"qemu": qemu}}
    await stack.create("c1", ["sleep"], **PATHLESS)
    return stack.networks.network


@pytest.mark.parametrize("late_s", [0, network_changes.SETTLE_S / 2], ids=["at once", "while the change settles"])
async def test_the_first_start_waits_for_every_interface_that_was_added_after_create(
    late_s: float, stack: Stack
) -> None:
    network = await created(stack)
    network.add("eth0", "eth1")
    await asyncio.sleep(late_s)

    await stack.pod.start(ContainerId("c1"), None)

    calls = stack.agent.calls
    assert [item.name for item in stack.agent.interfaces] == ["eth0", "eth1"]
    assert calls.index("UpdateRoutes") < calls.index("StartContainer")
    await asyncio.sleep(30)
    assert network.looks == 1, "what Start has applied is not applied again"


async def test_a_start_without_news_looks_nowhere(stack: Stack) -> None:
    network = await created(stack)

    await stack.pod.start(ContainerId("c1"), None)

    assert network.looks == 0


@pytest.mark.parametrize("fault", ["refused", "plug", "UpdateInterface", "look"])
async def test_a_start_whose_interfaces_the_guest_cannot_have_fails_with_the_reason(fault: str, stack: Stack) -> None:
    network = await created(stack)
    network.add("eth0")
    if fault == "refused":
        network.refused = ("connect link 'ib0': a link without Ethernet frames",)
    elif fault == "plug":
        stack.host.faults.plan({"plug": 1})
    elif fault == "look":
        network.failing_looks = 1
    else:
        stack.agent.failures["UpdateInterface"] = (Code.PERMISSION_DENIED, "policy")

    with pytest.raises(ShimError, match=r"Ethernet|plug|policy|scan links"):
        await stack.pod.start(ContainerId("c1"), None)

    assert "StartContainer" not in stack.agent.calls
    await stack.pod.wait(ContainerId("c1"), None)
    await stack.delete_last(ContainerId("c1"))
    assert stack.left() == {}


async def test_a_start_fails_when_interfaces_came_to_a_vm_that_takes_no_devices(stack: Stack) -> None:
    network = await created(stack, machine_type="microvm")
    network.add("eth0")

    with pytest.raises(FailedPrecondition, match="takes no devices while it runs"):
        await stack.pod.start(ContainerId("c1"), None)


async def test_later_starts_and_the_namespaces_of_cni_wait_for_no_change(stack: Stack) -> None:
    sandbox = {"io.kubernetes.cri.container-type": "sandbox", "io.kubernetes.cri.sandbox-id": "c1"}
    await stack.run("c1", ["pause"], annotations=sandbox, **NETWORK)
    network = stack.networks.network
    looks = network.looks
    network.add("eth1")

    await stack.run("app", ["sleep"], annotations={**sandbox, "io.kubernetes.cri.container-type": "container"})

    assert network.looks == looks


async def test_settings_of_the_namespace_come_with_each_container_and_the_specs_own_win(stack: Stack) -> None:
    stack.networks.network.sysctls = {"net.core.somaxconn": "77", "net.ipv6.conf.eth0.accept_ra": "0"}
    own = {"linux": {**NETWORK["linux"], "sysctl": {"net.core.somaxconn": "99"}}}

    await stack.create("c1", ["sleep"], **own)

    found = dict(stack.agent.containers["c1"].OCI.Linux.Sysctl)
    assert found == {"net.core.somaxconn": "99", "net.ipv6.conf.eth0.accept_ra": "0"}


@pytest.mark.parametrize(
    ("annotations", "text"),
    [
        ({}, "enter network namespace: it is the host's, and a VM cannot have the host's network"),
        (
            {"io.kubernetes.cri.container-type": "sandbox", "io.kubernetes.cri.sandbox-id": "c1"},
            "enter network namespace: hostNetwork is true, and a VM cannot have the host's network",
        ),
    ],
    ids=["container", "pod"],
)
async def test_the_path_of_the_hosts_namespace_is_refused_in_the_words_of_its_caller(
    annotations: dict[str, str], text: str, stack: Stack
) -> None:
    async def connect(*_args: Any, **_options: Any) -> Any:
        raise HostsNetwork("it is the host's")

    stack.networks.connect = connect  # type: ignore[method-assign]

    with pytest.raises(InvalidArgument, match=f"^{text}$"):
        await stack.create("c1", ["sleep"], annotations=annotations, **NETWORK)
