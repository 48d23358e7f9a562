"""Queries of a guest that the resolver in the pod's namespace answers: a fake agent, real datagrams."""

import asyncio
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from pyshim.agent.client import AgentClient
from pyshim.concurrency.tasks import TaskOwner
from pyshim.resources.network.plan.network import RESOLVER_ADDRESS
from pyshim.resources.network.plan.relay import BUILT_PROGRAM
from pyshim.resources.network.relay import GuestRelay
from pyshim.resources.network.resolver import Resolver, split_messages
from pyshim.ttrpc import Client, Code
from tests.fakes.agent import FakeAgent, FakeProcess
from tests.fakes.host import FakeHost
from tests.unit.pod.conftest import until


class Namespace:
    """Stands for the pod's: `resolver` is the socket that listens there, None while there is none."""

    def __init__(self) -> None:
        self.resolver: socket.socket | None = None
        self.looks = 0

    def listen(self) -> socket.socket:
        self.resolver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.resolver.bind(("127.0.0.1", 0))
        self.resolver.setblocking(False)
        return self.resolver

    async def connect(self) -> int | None:
        self.looks += 1
        if self.resolver is None:
            return None
        connection = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        connection.connect(self.resolver.getsockname())
        return connection.detach()

    def close(self) -> None:
        if self.resolver is not None:
            self.resolver.close()


class Scene:
    def __init__(self, resolver: Resolver, namespace: Namespace, agent: FakeAgent) -> None:
        self.resolver, self.namespace, self.agent = resolver, namespace, agent

    @property
    def relay(self) -> FakeProcess:
        return self.agent.processes["s1-relay", "resolver"]

    async def ask(self, *queries: bytes) -> None:
        """The relay prints the queries of the guest."""
        async with self.relay.changed:
            self.relay.output += b"".join(framed(query) for query in queries)
            self.relay.changed.notify_all()


def framed(message: bytes) -> bytes:
    return len(message).to_bytes(2) + message


@pytest.fixture
def scene(fast_clock: None, runner: asyncio.Runner) -> Iterator[Scene]:
    agent, host, tasks, namespace = FakeAgent(), FakeHost(), TaskOwner(), Namespace()
    host.files[BUILT_PROGRAM] = b"program"
    plan = SimpleNamespace(
        sandbox_id="s1",
        share=SimpleNamespace(mounts_dir="/share/mounts"),
        config=SimpleNamespace(runtime=SimpleNamespace(create_container_timeout_s=5.0)),
    )

    async def made() -> tuple[Client, Resolver]:
        client = Client(agent.connection())
        services: Any = SimpleNamespace(plan=plan, host=host, tasks=tasks)
        answering = AgentClient(client, request_timeout_s=5)
        relay = GuestRelay(services, answering)
        return client, Resolver(services, connect=namespace.connect, relay=relay, agent=answering)

    client, resolver = runner.run(made())
    yield Scene(resolver, namespace, agent)
    for close in (resolver.close, tasks.close, agent.close):
        runner.run(close())
    client.close()
    namespace.close()


async def received(listener: socket.socket) -> tuple[bytes, Any]:
    return await asyncio.get_running_loop().sock_recvfrom(listener, 1000)


async def test_without_a_resolver_nothing_runs_in_the_guest_until_there_is_one(scene: Scene) -> None:
    await scene.resolver.follow()
    assert scene.agent.calls == []

    scene.namespace.listen()
    await scene.resolver.follow()
    await scene.resolver.follow()

    assert scene.agent.calls.count("ExecProcess") == 1
    assert scene.relay.args == ["/relay", "resolve", RESOLVER_ADDRESS]
    assert scene.namespace.looks == 2


async def test_queries_and_answers_pass_as_they_are(scene: Scene) -> None:
    listener = scene.namespace.listen()
    await scene.resolver.follow()

    await scene.ask(b"first", b"second")
    asked = [await received(listener) for _ in range(2)]
    assert [message for message, _ in asked] == [b"first", b"second"]
    for message, client in asked:
        listener.sendto(message.upper(), client)

    await until(lambda: len(scene.relay.input) == len(framed(b"first") + framed(b"second")))
    assert bytes(scene.relay.input) == framed(b"FIRST") + framed(b"SECOND")


async def test_a_resolver_with_another_port_is_found_by_the_next_queries(scene: Scene) -> None:
    """dockerd was restarted with live-restore."""
    listener = scene.namespace.listen()
    await scene.resolver.follow()
    listener.close()
    listener = scene.namespace.listen()

    async def asks() -> None:
        while True:  # as a client repeats itself
            await scene.ask(b"again")
            await asyncio.sleep(1)

    asking = asyncio.ensure_future(asks())
    message, _ = await received(listener)
    asking.cancel()
    await asyncio.wait([asking])

    assert message == b"again"


async def test_a_guest_that_refuses_the_relay_has_no_resolver_and_is_asked_again(scene: Scene) -> None:
    scene.namespace.listen()
    scene.agent.failures["ExecProcess"] = (Code.PERMISSION_DENIED, "policy")
    await scene.resolver.follow()

    del scene.agent.failures["ExecProcess"]
    await scene.resolver.follow()

    assert scene.relay.args[1] == "resolve"


@pytest.mark.parametrize(
    ("data", "messages"),
    [
        (b"", [b""]),
        (b"\0", [b"\0"]),
        (framed(b"one"), [b"one", b""]),
        (framed(b"one") + framed(b""), [b"one", b"", b""]),
        (framed(b"one") + framed(b"two")[:4], [b"one", framed(b"two")[:4]]),
    ],
)
def test_messages_are_split_wherever_the_stream_was_cut(data: bytes, messages: list[bytes]) -> None:
    assert list(split_messages(data)) == messages
