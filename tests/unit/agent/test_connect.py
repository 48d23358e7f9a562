"""Addresses of agents, and connecting to one: late, silent, crowded, or no agent at all."""

import asyncio
import os
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from pyshim.agent.client import AgentClient
from pyshim.agent.connect import HANDSHAKE_S, Connector, open_stream, pause_s
from pyshim.model.errors import DeadlineExceeded, Unavailable
from pyshim.model.guest import AgentAddress, HvsockAddress, SerialAddress, UnixAddress, VsockAddress
from tests.fakes.agent import FakeAgent
from tests.fakes.clock import run_fast_forward
from tests.fakes.unix_sockets import crowded

from .client_runs import PATIENCE_S, until

pytestmark = pytest.mark.usefixtures("fast_clock")
CONNECTOR = Connector(partial(AgentClient, request_timeout_s=PATIENCE_S))


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("vsock://3:1024", VsockAddress(3, 1024)),
        ("hvsock:///run/v.sock:1024", HvsockAddress("/run/v.sock", 1024)),
        ("serial:///run/a.sock", SerialAddress("/run/a.sock")),
        ("unix:///run/a.sock", UnixAddress("/run/a.sock")),
    ],
)
def test_an_address_has_its_text(text: str, address: AgentAddress) -> None:
    assert str(address) == text


@pytest.mark.parametrize(("waited_s", "expected"), [(0.0, 0.01), (0.65, 0.065), (3.0, 0.3), (60.0, 0.5)])
def test_a_booting_guest_is_asked_again_in_step_with_the_time_it_has_taken(waited_s: float, expected: float) -> None:
    assert pause_s(waited_s) == pytest.approx(expected)


async def test_the_connector_waits_for_a_listener_that_comes_late(tmp_path: Path) -> None:
    fake = FakeAgent()
    path = str(tmp_path / "agent.sock")
    connecting = asyncio.ensure_future(CONNECTOR.connect(UnixAddress(path), PATIENCE_S))
    await asyncio.sleep(0.05)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    serving = asyncio.ensure_future(fake.server.serve(listener))
    client = await connecting
    await client.close()
    await fake.close()
    await serving


def test_the_connector_names_address_and_last_failure(tmp_path: Path) -> None:
    path = str(tmp_path / "absent.sock")

    with pytest.raises(DeadlineExceeded, match=r"unix://.*absent\.sock.*0\.1 s.*No such file"):
        run_fast_forward(CONNECTOR.connect(UnixAddress(path), 0.1))


@pytest.mark.parametrize("silent", [True, False], ids=["silent", "garbage"])
async def test_a_peer_that_is_no_agent_fails_by_the_deadline_and_leaves_no_socket(tmp_path: Path, silent: bool) -> None:
    path = str(tmp_path / "odd.sock")

    async def odd(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not silent:
            writer.write(os.urandom(64) * 1024)
        await reader.read()
        writer.close()

    server = await asyncio.start_unix_server(odd, path)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises((DeadlineExceeded, Unavailable)):
        await CONNECTOR.connect(UnixAddress(path), 0.3)
    await until(lambda: len(os.listdir("/proc/self/fd")) == before)
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize(("answer", "works"), [(b"OK 5\n", True), (b"no\n", False), (b"x" * 500, False), (b"", False)])
async def test_the_hybrid_handshake_is_checked(tmp_path: Path, answer: bytes, works: bool) -> None:
    path = str(tmp_path / "hv.sock")

    fake = FakeAgent()
    asked: list[bytes] = []

    async def back_end(listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            sock, _ = await loop.sock_accept(listener)
            with sock:
                sock.setblocking(False)
                asked.append(await loop.sock_recv(sock, 100))
                await loop.sock_sendall(sock, answer)
                if works:
                    await fake.server.serve_connection(sock)

    listener = socket.socket(socket.AF_UNIX)
    listener.setblocking(False)
    listener.bind(path)
    listener.listen()
    serving = asyncio.create_task(back_end(listener))
    connecting = CONNECTOR.connect(HvsockAddress(path, 1024), 0.5)
    if works:
        await (await connecting).close()
    else:
        with pytest.raises(DeadlineExceeded, match="vsock back end"):
            await connecting
    assert asked[0] == b"CONNECT 1024\n"
    serving.cancel()
    await asyncio.wait([serving])
    listener.close()
    await fake.close()


async def test_a_vsock_back_end_that_does_not_answer_is_asked_again(tmp_path: Path) -> None:
    path = str(tmp_path / "hv.sock")
    asked: list[bytes] = []
    ended: list[bool] = []

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readline())
        await reader.read()
        writer.close()
        ended.append(True)

    async with await asyncio.start_unix_server(silent, path):
        with pytest.raises(DeadlineExceeded, match=r"no answer within 30 s \(.* did not answer CONNECT within 10 s\)"):
            await CONNECTOR.connect(HvsockAddress(path, 1024), 3 * HANDSHAKE_S)
        await until(lambda: len(ended) == len(asked))

    assert asked[:2] == [b"CONNECT 1024\n"] * 2


@pytest.mark.parametrize(
    "address", [UnixAddress, SerialAddress, lambda path: HvsockAddress(path, 1024)], ids=["unix", "serial", "hvsock"]
)
async def test_a_listener_that_has_no_room_is_waited_for(
    real_clock: None, address: Callable[[str], AgentAddress], tmp_path: Path
) -> None:
    """asyncio's own connect answers with a socket that is not connected."""

    path = str(tmp_path / "agent")

    with crowded(path), pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            (await open_stream(address(path))).close()
