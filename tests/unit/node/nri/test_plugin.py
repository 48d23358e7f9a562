"""The plugin beside a runtime over a socket pair: registration, events, updates of others, and runtimes that go."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from protos.nri import v1alpha1_pb2 as pb
from pyshim.model.errors import InvalidArgument
from pyshim.model.host_facts import Cpu, Machine, MachineError, Node
from pyshim.node.nri.assignments import Assignments
from pyshim.node.nri.plugin import NriPlugin, RegistrationRefused
from pyshim.node.nri.pods import EXCLUSIVE, SHARED, Pods
from tests.fakes.nri_runtime import FakeRuntime, container, cpus_of, pod

T = TypeVar("T")
_ALL = (1 << 0) | (1 << 1) | (1 << 2) | (1 << 3) | (1 << 4) | (1 << 7) | (1 << 9) | (1 << 10)


def _pods(cpus: int = 4) -> Pods:
    """CPU 0 is reserved."""
    return Pods(Assignments(machine=_machine(cpus), reserved=(0,)), frozenset({"pykata"}))


def _machine(cpus: int, offline: int | None = None) -> Machine:
    """One node, one thread per core."""
    return Machine(
        cpus=tuple(
            Cpu(id=each, core=each, l3=0, die=0, socket=0, node=0, online=each != offline) for each in range(cpus)
        ),
        nodes=(Node(id=0, memory_bytes=64 << 30, distances=(10,)),),
    )


def _plugin(pods: Pods | None = None, read_machine: Callable[[], Machine] | None = None) -> NriPlugin:
    pods = pods or _pods()
    there = pods.assignments.machine
    return NriPlugin(pods, name="pyshim", index="20", read_machine=read_machine or (lambda: there))


@contextlib.asynccontextmanager
async def _connected(plugin: NriPlugin, *, is_old: bool = False) -> AsyncIterator[FakeRuntime]:
    """A runtime that the plugin has registered with."""
    ours, theirs = socket.socketpair()
    async with FakeRuntime(theirs, is_old=is_old) as runtime:
        serving = asyncio.ensure_future(plugin.serve(ours))
        try:
            yield runtime
        finally:
            serving.cancel()
            await asyncio.wait([serving])


def _created(reply: bytes) -> tuple[str, bool]:
    """The CPUs of an adjusted container, and whether it is marked as ours."""
    adjust = pb.CreateContainerResponse.FromString(reply).adjust
    return adjust.linux.resources.cpu.cpus, "io.pyshim.nri/cpus" in adjust.annotations


async def test_it_registers_and_wants_the_events_it_follows_and_no_others() -> None:
    async with _connected(_plugin()) as runtime:
        assert await runtime.accept() == _ALL
        request = runtime.registered.result()
        assert (request.plugin_name, request.plugin_idx) == ("pyshim", "20")


@pytest.mark.parametrize("is_old", [False, True], ids=["calls", "state changes"])
async def test_others_leave_the_cpus_of_a_vm_and_come_back_when_it_goes(is_old: bool) -> None:
    async with _connected(_plugin(), is_old=is_old) as runtime:
        await runtime.accept([pod("web")], [container("c1", "web")])

        await runtime.call("RunPodSandbox", pb.PodRequest(pod=pod("vm", handler="pykata", cpus=2)))
        assert await runtime.updates.get() == {"c1": ("0,3", "")}

        reply = await runtime.call(
            "CreateContainer", pb.ContainerRequest(pod=pod("vm", handler="pykata"), container=container("v1", "vm"))
        )
        assert _created(reply)[0] == "1-2"
        created = pb.ContainerRequest(pod=pod("web"), container=container("c2", "web"))
        assert _created(await runtime.call("CreateContainer", created)) == ("0,3", True)
        await runtime.call("PostCreateContainer", created)
        await runtime.call("StopPodSandbox", pb.PodRequest(pod=pod("vm", handler="pykata")))
        assert await runtime.updates.get() == {"c1": ("0-3", ""), "c2": ("0-3", "")}
        await runtime.call("RemovePodSandbox", pb.PodRequest(pod=pod("vm", handler="pykata")))
        assert runtime.updates.empty()


@pytest.mark.parametrize(
    ("cpus", "own", "given"),
    [(2, "", "gold"), (0, "", "silver"), (2, "mine", "")],
    ids=["CPUs alone", "shared CPUs", "has one already"],
)
async def test_containers_of_vms_get_the_nodes_class(cpus: int, own: str, given: str) -> None:
    machine, classes = _machine(4), {EXCLUSIVE: "gold", SHARED: "silver"}
    pods = Pods(Assignments(machine=machine, reserved=()), frozenset({"pykata"}), classes)
    async with _connected(_plugin(pods)) as runtime:
        await runtime.accept()
        vm, beside = pod("vm", handler="pykata", cpus=cpus), pod("web")
        await runtime.call("RunPodSandbox", pb.PodRequest(pod=vm))
        asked = container("v1", "vm")
        asked.linux.rdt.clos_id.value = own

        reply = await runtime.call("CreateContainer", pb.ContainerRequest(pod=vm, container=asked))
        other = await runtime.call("CreateContainer", pb.ContainerRequest(pod=beside, container=container("c", "web")))

        assert _class(reply) == given
        assert _class(other) == ""


def _class(reply: bytes) -> str:
    return pb.CreateContainerResponse.FromString(reply).adjust.linux.resources.rdt_class.value


async def test_nothing_is_touched_on_a_node_where_no_vm_has_cpus_alone() -> None:
    async with _connected(_plugin()) as runtime:
        await runtime.accept([pod("web")], [container("c1", "web")])
        reply = await runtime.call(
            "CreateContainer", pb.ContainerRequest(pod=pod("web"), container=container("c2", "web"))
        )
        assert _created(reply) == ("", True)
        await runtime.call("PostCreateContainer", pb.ContainerRequest(container=container("c2", "web")))
        await runtime.call("StopContainer", pb.ContainerRequest(container=container("c1", "web")))
        await runtime.call("StopContainer", pb.ContainerRequest(container=container("never seen", "web")))
        await runtime.call("RemovePodSandbox", pb.PodRequest(pod=pod("never seen")))
        await asyncio.sleep(0)
        assert runtime.updates.empty()


async def test_pods_it_never_saw_are_placed_when_it_synchronizes() -> None:
    async with _connected(_plugin()) as runtime:
        pods = [pod("vm", handler="pykata", cpus=1), pod("web"), pod("small", handler="pykata")]
        containers = [container("v1", "vm"), container("c1", "web"), container("s1", "small")]
        await runtime.accept(pods, containers)

        assert await runtime.updates.get() == {"v1": ("1", ""), "c1": ("0,2-3", "")}


async def test_a_pod_that_may_have_stopped_has_no_cpus_alone_until_a_container_comes() -> None:
    """A runtime lists stopped pods, too, and does not say which they are."""

    async with _connected(_plugin()) as runtime:
        await runtime.accept([pod("vm", handler="pykata", cpus=1), pod("web")], [container("c1", "web")])
        await runtime.call("RunPodSandbox", pb.PodRequest(pod=pod("second")))
        await asyncio.sleep(0)
        assert runtime.updates.empty()

        created = pb.ContainerRequest(pod=pod("vm", handler="pykata", cpus=1), container=container("v1", "vm"))
        assert _created(await runtime.call("CreateContainer", created))[0] == "1"
        assert await runtime.updates.get() == {"c1": ("0,2-3", "")}


async def test_cpus_that_the_kubelet_gave_a_container_alone_stay_its_own() -> None:
    async with _connected(_plugin()) as runtime:
        own = container("own", "db", had="2", cpus=1)
        await runtime.accept([pod("db", cpus=1), pod("web")], [own, container("c1", "web", had="0,1,3")])

        await runtime.call("RunPodSandbox", pb.PodRequest(pod=pod("vm", handler="pykata", cpus=1)))

        assert await runtime.updates.get() == {"c1": ("0,3", "")}


async def test_a_container_marked_by_an_earlier_run_has_no_cpus_of_its_own() -> None:
    async with _connected(_plugin()) as runtime:
        earlier = container("c1", "db", had="2", cpus=1, ours=True)
        await runtime.accept([pod("db", cpus=1)], [earlier])

        assert await runtime.updates.get() == {"c1": ("0-3", "")}


async def test_another_clients_update_keeps_a_container_off_a_vms_cpus() -> None:
    async with _connected(_plugin()) as runtime:
        await runtime.accept(
            [pod("vm", handler="pykata", cpus=1), pod("web")], [container("v1", "vm"), container("c1", "web")]
        )
        request = pb.UpdateContainerRequest(pod=pod("web"), container=container("c1", "web"))
        request.linux_resources.cpu.cpus = "0-3"

        reply = await runtime.call("UpdateContainer", request)

        assert cpus_of(pb.UpdateContainerResponse.FromString(reply).update) == {"c1": ("0,2-3", "")}
        request.linux_resources.cpu.cpus = ""
        assert await runtime.call("UpdateContainer", request) == b""


async def test_events_are_answered_while_the_runtime_is_busy_with_an_update() -> None:
    """A runtime holds its lock while it updates containers, and a plugin that is slow in an event is closed."""

    async with _connected(_plugin()) as runtime:
        runtime.answers_updates.clear()
        await runtime.accept([pod("web")], [container("c1", "web")])
        await runtime.call("RunPodSandbox", pb.PodRequest(pod=pod("vm", handler="pykata", cpus=1)))
        assert await runtime.updates.get() == {"c1": ("0,2-3", "")}

        await runtime.call("RunPodSandbox", pb.PodRequest(pod=pod("second", handler="pykata", cpus=1)))
        await runtime.call("StopPodSandbox", pb.PodRequest(pod=pod("vm")))
        runtime.answers_updates.set()

        assert await runtime.updates.get() == {"c1": ("0-1,3", "")}


async def test_a_container_that_cannot_be_updated_is_named_and_not_asked_for_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with _connected(_plugin()) as runtime:
        runtime.cannot_update = {"c1"}
        await runtime.accept([pod("web")], [container("c1", "web"), container("c2", "web")])
        await runtime.call("RunPodSandbox", pb.PodRequest(pod=pod("vm", handler="pykata", cpus=1)))
        assert await runtime.updates.get() == {"c1": ("0,2-3", ""), "c2": ("0,2-3", "")}
        await runtime.call("RunPodSandbox", pb.PodRequest(pod=pod("third")))
        await asyncio.sleep(0)
        assert runtime.updates.empty()

    assert [record.__dict__["containers"] for record in caplog.records if "not updated" in record.message] == ["c1"]


async def test_many_containers_are_updated_by_calls_of_bounded_size() -> None:
    async with _connected(_plugin()) as runtime:
        containers = [container(f"{number:064}", "web") for number in range(150)]
        await runtime.accept([pod("web")], containers)
        await runtime.call("RunPodSandbox", pb.PodRequest(pod=pod("vm", handler="pykata", cpus=1)))

        calls = [await runtime.updates.get() for _ in range(3)]

        assert [len(each) for each in calls] == [64, 64, 22]
        assert {key for each in calls for key in each} == {each.id for each in containers}


@pytest.mark.parametrize("method", ["RunPodSandbox", "CreateContainer", "UpdateContainer", "StateChange"])
async def test_an_event_that_makes_no_sense_fails_no_pod(method: str, caplog: pytest.LogCaptureFixture) -> None:
    class Garbage:
        def SerializeToString(self) -> bytes:
            return b"\xff\xff\xff"

    async with _connected(_plugin()) as runtime:
        await runtime.accept()
        if method == "StateChange":
            assert await runtime.call(method, pb.StateChangeEvent(event=99)) == b""  # type: ignore[arg-type]
        else:
            assert await runtime.call(method, Garbage()) == b""

    assert (method == "StateChange") or any("event not followed" in record.message for record in caplog.records)


async def test_a_vm_that_shares_cpus_and_has_not_asked_gets_no_update() -> None:
    """A CPU set would size it: Kata counts the CPUs of a container that has no quota."""

    async with _connected(_plugin()) as runtime:
        await runtime.accept()
        await runtime.call("RunPodSandbox", pb.PodRequest(pod=pod("large", handler="pykata", cpus=9)))
        created = pb.ContainerRequest(pod=pod("large", handler="pykata"), container=container("l1", "large"))
        assert _created(await runtime.call("CreateContainer", created)) == ("", False)


async def test_a_refused_registration_is_named() -> None:
    ours, theirs = socket.socketpair()
    async with FakeRuntime(theirs, refuses='invalid plugin name "x"'):
        with pytest.raises(RegistrationRefused, match=r"'20-pyshim': the runtime refuses it: invalid plugin name"):
            await _plugin().serve(ours)


@pytest.mark.parametrize(
    ("name", "index", "text"),
    [("a b", "10", "name plugin 'a b'"), ("", "10", "name plugin ''"), ("ok", "7", "not two digits")],
)
def test_a_name_that_no_runtime_takes_is_refused_here(name: str, index: str, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        NriPlugin(_pods(), name=name, index=index, read_machine=lambda: _machine(1))


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        (b"", "the runtime closed the connection"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "exceed the limit"),
        (b"\0\0\0\2\0", "inside a frame"),
    ],
    ids=["closed at once", "no NRI at all", "half a header"],
)
async def test_a_peer_that_is_no_runtime_ends_the_connection_with_its_reason(sent: bytes, text: str) -> None:
    ours, theirs = socket.socketpair()
    theirs.send(sent)
    theirs.shutdown(socket.SHUT_WR)

    assert text in await _plugin().serve(ours)

    theirs.close()


async def test_a_runtime_that_never_synchronizes_is_given_up(fast_clock: None) -> None:
    ours, theirs = socket.socketpair()
    async with FakeRuntime(theirs):
        assert "not synchronized the plugin within 30 s" in await _plugin().serve(ours)


async def test_it_serves_the_runtime_that_comes_after_a_restart_and_keeps_what_is_placed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "nri.sock"

    async def accepted(listener: socket.socket) -> socket.socket:
        return (await asyncio.get_running_loop().sock_accept(listener))[0]

    running = asyncio.ensure_future(_plugin().run(str(path)))
    try:
        for turn in range(3):
            listener = socket.socket(socket.AF_UNIX)
            listener.setblocking(False)
            path.unlink(missing_ok=True)
            listener.bind(str(path))
            listener.listen()
            async with FakeRuntime(await accepted(listener)) as runtime:
                await runtime.accept(
                    [pod("vm", handler="pykata", cpus=1), pod("web")],
                    [container(f"c{turn}", "web"), container("v1", "vm", had="1")],
                )
                updates = await runtime.updates.get()
                assert updates[f"c{turn}"] == ("0,2-3", "")
            listener.close()
    finally:
        running.cancel()
        await asyncio.wait([running])

    assert [record.message for record in caplog.records].count("placed") == 1


@pytest.mark.parametrize(
    ("offline", "vm", "others"),
    [(3, "1-2", "0"), (2, "1,3", "0"), (None, "1-2", "0,3")],
    ids=["a CPU of others", "a CPU of the VM", "none"],
)
async def test_the_next_runtime_finds_the_machine_as_it_is_then(
    offline: int | None, vm: str, others: str, caplog: pytest.LogCaptureFixture
) -> None:
    there = _machine(4)
    plugin = _plugin(_pods(), lambda: there)

    pods = [pod("web"), pod("vm", handler="pykata", cpus=2)]
    async with _connected(plugin) as runtime:
        await runtime.accept(pods, [container("c1", "web"), container("v1", "vm")])
        assert await runtime.updates.get() == {"c1": ("0,3", ""), "v1": ("1-2", "")}
    there = _machine(4, offline)
    async with _connected(plugin) as runtime:
        await runtime.accept(pods, [container("c1", "web"), container("v1", "vm")])
        assert await runtime.updates.get() == {"c1": (others, ""), "v1": (vm, "")}

    assert [record.message for record in caplog.records].count("placement not kept") == (offline == 2)


async def test_a_machine_that_cannot_be_read_again_is_the_one_it_was(caplog: pytest.LogCaptureFixture) -> None:
    def unreadable() -> Machine:
        raise MachineError("read 'cpu/online': it is missing")

    async with _connected(_plugin(_pods(), unreadable)) as runtime:
        await runtime.accept([pod("web")], [container("c1", "web")])
        await runtime.call("RunPodSandbox", pb.PodRequest(pod=pod("vm", handler="pykata", cpus=2)))
        assert await runtime.updates.get() == {"c1": ("0,3", "")}

    assert "machine not read again" in [record.message for record in caplog.records]
