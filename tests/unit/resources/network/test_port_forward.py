"""Port-forward between a listener on the host and the guest's agent, both fakes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import pyshim
from pyshim.agent.client import AgentClient
from pyshim.concurrency.deadlines import UNDO_S
from pyshim.concurrency.tasks import TaskOwner
from pyshim.model.errors import Unavailable
from pyshim.resources.network.plan.relay import BUILT_PROGRAM, relay_plan
from pyshim.resources.network.port_forward import LINGER_S, MAX_CONNECTIONS, PortForward
from pyshim.resources.network.relay import GuestRelay
from pyshim.ttrpc import Client, Code
from tests.fakes.agent import FakeAgent
from tests.fakes.host import FakeHost
from tests.unit.pod.conftest import until

ECHO, NOBODY, SILENT = 8080, 9, 13
PROGRAM = b"\x7fELF"


class FakeConnection:
    def __init__(self, port: int) -> None:
        self.port = port
        self.incoming: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.received = b""
        self.ending = ""
        self.refuses = False

    async def read(self) -> bytes:
        data = await self.incoming.get()
        if data is None:
            raise Unavailable("read connection: gone")
        return data

    async def write(self, data: bytes) -> None:
        if self.refuses:
            raise Unavailable("write connection: gone")
        self.received += data

    def reset(self) -> None:
        self.ending = self.ending or "reset"

    def close(self) -> None:
        self.ending = self.ending or "closed"


class FakeForwardListener:
    def __init__(self) -> None:
        self.arrivals: asyncio.Queue[FakeConnection] = asyncio.Queue()
        self.is_closed = False

    async def accept(self) -> FakeConnection:
        return await self.arrivals.get()

    async def close(self) -> None:
        self.is_closed = True


class Scene:
    def __init__(self, forward: PortForward, listener: FakeForwardListener, agent: FakeAgent, host: FakeHost) -> None:
        self.forward, self.forward_listener, self.agent, self.host = forward, listener, agent, host

    def dial(self, port: int, *data: bytes) -> FakeConnection:
        connection = FakeConnection(port)
        for piece in data:
            connection.incoming.put_nowait(piece)
        self.forward_listener.arrivals.put_nowait(connection)
        return connection


@pytest.fixture
def scene(fast_clock: None, runner: asyncio.Runner) -> Iterator[Scene]:
    agent, host, tasks, listener = FakeAgent(), FakeHost(), TaskOwner(), FakeForwardListener()
    host.files[BUILT_PROGRAM] = PROGRAM

    async def started() -> tuple[Client, PortForward]:
        client = Client(agent.connection())
        services: Any = SimpleNamespace(plan=_plan(), host=host, tasks=tasks)
        answering = AgentClient(client, request_timeout_s=5)
        relay = GuestRelay(services, answering)
        forward = PortForward(services, listener=listener, relay=relay, agent=answering)
        forward.has_listeners = True
        forward.start()
        return client, forward

    client, forward = runner.run(started())
    yield Scene(forward, listener, agent, host)
    for close in (forward.close, tasks.close, agent.close):
        runner.run(close())
    client.close()
    assert listener.is_closed


def _plan() -> Any:
    """The parts of a sandbox's plan that forwarding looks at."""
    return SimpleNamespace(
        sandbox_id="s1",
        share=SimpleNamespace(mounts_dir="/share/mounts"),
        config=SimpleNamespace(runtime=SimpleNamespace(create_container_timeout_s=5.0)),
    )


async def test_what_is_dialled_is_answered_by_the_guest_to_the_end(scene: Scene) -> None:
    connection = scene.dial(ECHO, b"one ", b"two", b"")

    await until(lambda: connection.ending)

    assert (connection.received, connection.ending) == (b"one two", "closed")


async def test_nothing_is_made_before_the_first_connection_and_one_container_serves_all(scene: Scene) -> None:
    assert scene.agent.calls == []
    assert list(scene.host.files) == [BUILT_PROGRAM]

    connections = [scene.dial(ECHO, b"hello", b"") for _ in range(5)]
    await until(lambda: all(connection.ending for connection in connections))

    assert [connection.received for connection in connections] == [b"hello"] * 5
    assert scene.agent.calls.count("CreateContainer") == 1
    assert list(scene.agent.containers) == ["s1-relay"]
    assert scene.host.files["/share/mounts/s1-relay/rootfs/relay"] == PROGRAM


async def test_without_its_program_forwarding_fails_by_name_and_the_next_one_tries_again(
    caplog: pytest.LogCaptureFixture, scene: Scene
) -> None:
    del scene.host.files[BUILT_PROGRAM]
    refused = scene.dial(ECHO, b"hello")
    await until(lambda: refused.ending)
    scene.host.files[BUILT_PROGRAM] = PROGRAM

    served = scene.dial(ECHO, b"hello", b"")
    await until(lambda: served.ending)

    assert refused.ending == "reset"
    assert (served.received, served.ending) == (b"hello", "closed")

    (said,) = [record.__dict__["error"] for record in caplog.records if record.message == "forward port"]
    assert BUILT_PROGRAM in said
    assert "make setup" in said


async def test_before_the_pod_has_a_container_connections_are_reset(scene: Scene) -> None:
    """kata-agent takes the guest's first container's pid namespace for the pod's shared one: it must not be ours."""
    scene.forward.has_listeners = False
    connection = scene.dial(ECHO, b"hello")

    await until(lambda: connection.ending)

    assert connection.ending == "reset"
    assert scene.agent.calls == []


async def test_a_port_without_a_listener_resets_the_connection(scene: Scene) -> None:
    connection = scene.dial(NOBODY, b"hello")

    await until(lambda: connection.ending)

    assert (connection.received, connection.ending) == (b"", "reset")


@pytest.mark.parametrize("method", ["CreateContainer", "StartContainer", "ExecProcess"])
async def test_an_agent_that_refuses_resets_the_connection_and_the_next_one_tries_again(
    method: str, scene: Scene
) -> None:
    scene.agent.failures[method] = (Code.INTERNAL, "policy says no")
    refused = scene.dial(ECHO, b"hello")
    await until(lambda: refused.ending)
    del scene.agent.failures[method]

    served = scene.dial(ECHO, b"hello", b"")
    await until(lambda: served.ending)

    assert refused.ending == "reset"
    assert (served.received, served.ending) == (b"hello", "closed")


async def test_a_client_that_goes_away_takes_the_process_in_the_guest_along(scene: Scene) -> None:
    connection = scene.dial(SILENT, b"hello")
    await until(lambda: "WriteStdin" in scene.agent.calls)

    connection.incoming.put_nowait(None)

    await until(lambda: connection.ending)
    (process,) = [one for (_, name), one in scene.agent.ended.items() if name.startswith("forward-")]
    assert process.signals == [9]


async def test_a_client_that_takes_no_answer_takes_the_process_in_the_guest_along(scene: Scene) -> None:
    connection = scene.dial(ECHO)
    connection.refuses = True
    connection.incoming.put_nowait(b"hello")

    await until(lambda: connection.ending)

    assert connection.ending == "reset"
    assert "SignalProcess" in scene.agent.calls


async def test_a_listener_silent_long_after_the_clients_end_is_given_up(scene: Scene) -> None:
    loop = asyncio.get_running_loop()
    started = loop.time()
    connection = scene.dial(SILENT, b"hello", b"")

    await until(lambda: connection.ending)

    assert loop.time() - started >= LINGER_S
    assert connection.ending == "reset"


async def test_more_connections_than_the_limit_are_refused_and_room_is_made_again(scene: Scene) -> None:
    held = [scene.dial(ECHO) for _ in range(MAX_CONNECTIONS)]
    await until(lambda: scene.agent.calls.count("ExecProcess") == MAX_CONNECTIONS)

    refused = scene.dial(ECHO, b"hello")
    await until(lambda: refused.ending)
    held[0].incoming.put_nowait(b"")
    await until(lambda: held[0].ending)
    served = scene.dial(ECHO, b"hello", b"")
    await until(lambda: served.ending)

    assert refused.ending == "reset"
    assert served.ending == "closed"


@pytest.mark.parametrize("method", ["SignalProcess", "WaitProcess"])
async def test_a_hung_guest_does_not_hold_close(method: str, scene: Scene) -> None:
    connections = [scene.dial(ECHO, b"hello") for _ in range(3)]
    await until(lambda: all(connection.received for connection in connections))
    scene.agent.hung.add(method)

    async with asyncio.timeout(UNDO_S / 2):
        await scene.forward.close()

    assert [connection.ending for connection in connections] == ["reset"] * 3


def test_the_program_is_the_one_that_the_set_up_builds() -> None:
    assert Path(BUILT_PROGRAM) == Path(pyshim.__file__).parents[1] / ".build/guest/relay"


def test_the_relay_container_has_no_rights_and_no_namespace_of_the_pods_network() -> None:
    relay = relay_plan("s1", _plan().share)  # type: ignore[arg-type]

    process, linux = relay.guest.spec["process"], relay.guest.spec["linux"]
    assert process["capabilities"] == {}
    assert process["noNewPrivileges"] is True
    assert process["user"]["uid"] != 0
    assert relay.guest.spec["root"]["readonly"] is True
    assert {item["type"] for item in linux["namespaces"]} == {"mount", "ipc", "uts"}
