"""The agent client against a real ttrpc server: calls, refusals, garbage, silence."""

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import DecodeError

from protos.agent import agent_pb2 as pb
from pyshim.agent import translate
from pyshim.agent.client import AgentClient, printable
from pyshim.agent.connect import Connector, open_stream
from pyshim.model.agent_address import (
    AgentAddress,
    HvsockAddress,
    SerialAddress,
    UnixAddress,
    VsockAddress,
    parse_agent_address,
)
from pyshim.model.errors import AgentGone, DeadlineExceeded, InvalidArgument, NotFound, ShimError, Unavailable
from pyshim.model.guest import GuestSandbox, NetworkAddress, NetworkInterface, NetworkRoute
from pyshim.ttrpc import Client
from tests.fakes.agent import FakeAgent
from tests.fakes.clock import run_fast_forward
from tests.fakes.unix_sockets import crowded

PATIENCE_S = 60.0
"""For whatever is expected to come."""


def run(
    body: Callable[[FakeAgent, AgentClient], Coroutine[Any, Any, None]], *, request_timeout_s: float = PATIENCE_S
) -> None:
    async def main() -> None:
        fake = FakeAgent()
        client = AgentClient(await Client.connect_socket(fake.connection()), request_timeout_s=request_timeout_s)
        try:
            await body(fake, client)
        finally:
            await client.close()
            await fake.close()

    run_loop(main())


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    """All peers live in the loop: no deadline passes because the machine is busy."""

    async def guarded() -> None:
        async with asyncio.timeout(2 * PATIENCE_S):
            await main

    run_fast_forward(guarded())


async def until(holds: Callable[[], object]) -> None:
    """`holds` is true; the limit of `run_loop` ends a wait in vain."""
    while not holds():  # noqa: ASYNC110 - nothing announces it
        await asyncio.sleep(0.001)


def test_an_error_of_the_agent_keeps_its_code_and_names_the_action() -> None:
    async def body(fake: FakeAgent, client: AgentClient) -> None:
        with pytest.raises(NotFound, match=r"start container 'x' in guest: no process x/"):
            await client.start_container("x")

    run(body)


def test_an_agent_that_does_not_answer_meets_the_deadline() -> None:
    async def body(fake: FakeAgent, client: AgentClient) -> None:
        fake.hung.add("PauseContainer")
        with pytest.raises(DeadlineExceeded, match=r"pause container 'x' in guest: no reply within 0\.2 s"):
            await client.pause_container("x")

    run(body, request_timeout_s=0.2)


SANDBOX = GuestSandbox(
    sandbox_id="s",
    hostname="",
    dns=(),
    storages=(),
    shared_pid_namespace=False,
    guest_hook_path="",
    kernel_modules=(),
)


@pytest.mark.parametrize(
    ("method", "call", "limit_s"),
    [
        ("SetPolicy", lambda client: client.set_policy("p"), 50),
        ("CreateSandbox", lambda client: client.create_sandbox(SANDBOX), 50),
        ("DestroySandbox", lambda client: client.destroy_sandbox(), 20),
        ("StartContainer", lambda client: client.start_container("c"), 20),
        ("RemoveContainer", lambda client: client.remove_container("c", 7), 7.5),
    ],
    ids=["policy", "sandbox", "destroy", "start", "remove"],
)
def test_only_calls_that_set_up_the_sandbox_have_its_deadline(
    method: str, call: Callable[[AgentClient], Coroutine[Any, Any, None]], limit_s: float
) -> None:
    """Behind a service that has just made the VM they are the first to do anything in it."""

    async def main() -> None:
        fake = FakeAgent()
        fake.hung.add(method)
        connection = await Client.connect_socket(fake.connection())
        client = AgentClient(connection, request_timeout_s=20, set_up_timeout_s=50)
        try:
            with pytest.raises(DeadlineExceeded, match=rf"no reply within {limit_s:g} s"):
                await call(client)
        finally:
            await client.close()
            await fake.close()

    run_loop(main())


def test_an_agent_that_goes_away_is_gone_for_calls_and_waiters() -> None:
    async def body(fake: FakeAgent, client: AgentClient) -> None:
        fake.hung.add("GetOOMEvent")
        waiting = asyncio.ensure_future(client.next_oom_event())
        gone = asyncio.ensure_future(client.gone())
        await until(lambda: "GetOOMEvent" in fake.calls)

        await fake.server.shutdown(0)

        with pytest.raises(ShimError):
            await waiting
        assert isinstance(await gone, str)
        with pytest.raises(AgentGone):
            await client.start_container("x")

    run(body)


@pytest.mark.parametrize("reply", [b"\xff\xff\xff", b"\x08"])
def test_a_reply_that_is_no_message_is_an_error(reply: bytes) -> None:
    async def body(fake: FakeAgent, client: AgentClient) -> None:
        class Garbage:
            def SerializeToString(self) -> bytes:
                return reply

        async def answer(payload: bytes) -> Any:
            return Garbage()

        fake._on_WaitProcess = answer  # type: ignore[method-assign]
        with pytest.raises(ShimError, match=r"not a grpc\.WaitProcessResponse"):
            await client.wait_process("c", "c")

    run(body)


def test_more_output_than_asked_for_is_an_error() -> None:
    async def body(fake: FakeAgent, client: AgentClient) -> None:
        async def answer(payload: bytes) -> Any:
            return pb.ReadStreamResponse(data=b"x" * 11)

        fake._on_ReadStdout = answer  # type: ignore[method-assign]
        with pytest.raises(ShimError, match="more than was asked for"):
            await client.read_stdout("c", "c", 10)

    run(body)


@pytest.mark.parametrize(("status", "seen"), [(0, 0), (3, 3), (137, 137), (-1, 255), (256 + 9, 9)])
def test_an_exit_status_is_always_a_byte(status: int, seen: int) -> None:
    async def body(fake: FakeAgent, client: AgentClient) -> None:
        async def answer(payload: bytes) -> Any:
            return pb.WaitProcessResponse(status=status)

        fake._on_WaitProcess = answer  # type: ignore[method-assign]
        assert await client.wait_process("c", "c") == seen

    run(body)


def test_a_guests_words_are_bounded_and_harmless() -> None:
    assert printable("a\x1b[31mred\nline\x00") == "a [31mred line"
    assert len(printable("x" * 100_000)) == 4096


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("vsock://3:1024", VsockAddress(3, 1024)),
        ("hvsock:///run/v.sock:1024", HvsockAddress("/run/v.sock", 1024)),
        ("serial:///run/a.sock", SerialAddress("/run/a.sock")),
        ("unix:///run/a.sock", UnixAddress("/run/a.sock")),
    ],
)
def test_an_address_and_its_text_are_one(text: str, address: AgentAddress) -> None:
    assert parse_agent_address(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    "text",
    ["", "unix://", "vsock://x:1", "vsock://3:", "vsock://3:99999999999", "tcp://1:2", "vsock:3:4", "hvsock://:1"],
)
def test_a_text_that_is_no_address_is_named(text: str) -> None:
    with pytest.raises(InvalidArgument, match="parse agent address"):
        parse_agent_address(text)


def test_the_connector_waits_for_a_listener_that_comes_late(tmp_path: Path) -> None:
    async def main() -> None:
        fake = FakeAgent()
        path = str(tmp_path / "agent.sock")
        connecting = asyncio.ensure_future(
            Connector(request_timeout_s=PATIENCE_S).connect(UnixAddress(path), PATIENCE_S)
        )
        await asyncio.sleep(0.05)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen()
        serving = asyncio.ensure_future(fake.server.serve(listener))
        client = await connecting
        await client.close()
        await fake.close()
        await serving

    run_loop(main())


def test_the_connector_names_address_and_last_failure(tmp_path: Path) -> None:
    path = str(tmp_path / "nobody.sock")

    with pytest.raises(DeadlineExceeded, match=r"unix://.*nobody\.sock.*0\.1 s.*No such file"):
        run_fast_forward(Connector(request_timeout_s=PATIENCE_S).connect(UnixAddress(path), 0.1))


@pytest.mark.parametrize("silent", [True, False], ids=["silent", "garbage"])
def test_a_peer_that_is_no_agent_fails_by_the_deadline_and_leaves_no_socket(tmp_path: Path, silent: bool) -> None:
    path = str(tmp_path / "odd.sock")

    async def main() -> None:
        async def odd(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if not silent:
                writer.write(os.urandom(64) * 1024)
            await reader.read()
            writer.close()

        server = await asyncio.start_unix_server(odd, path)
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises((DeadlineExceeded, Unavailable)):
            await Connector(request_timeout_s=PATIENCE_S).connect(UnixAddress(path), 0.3)
        await until(lambda: len(os.listdir("/proc/self/fd")) == before)
        server.close()
        await server.wait_closed()

    run_loop(main())


@pytest.mark.parametrize(("answer", "works"), [(b"OK 5\n", True), (b"no\n", False), (b"x" * 500, False), (b"", False)])
def test_the_hybrid_handshake_is_checked(tmp_path: Path, answer: bytes, works: bool) -> None:
    path = str(tmp_path / "hv.sock")

    async def main() -> None:
        fake = FakeAgent()
        asked: list[bytes] = []

        async def back_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked.append(await reader.readline())
            writer.write(answer)
            await writer.drain()
            if works:
                await fake.server.serve_streams(reader, writer)
            writer.close()

        server = await asyncio.start_unix_server(back_end, path)
        connecting = Connector(request_timeout_s=PATIENCE_S).connect(HvsockAddress(path, 1024), 0.5)
        if works:
            await (await connecting).close()
        else:
            with pytest.raises(DeadlineExceeded, match="vsock back end"):
                await connecting
        assert asked[0] == b"CONNECT 1024\n"
        await fake.close()
        server.close()
        await server.wait_closed()

    run_loop(main())


def test_a_spec_becomes_the_agents_message() -> None:
    spec = translate.spec(
        {
            "ociVersion": "1.1.0",
            "process": {
                "args": ["sh"],
                "user": {"uid": 1, "additionalGids": [5]},
                "rlimits": [{"type": "RLIMIT_NOFILE", "hard": 2**64 - 1, "soft": 1}],
                "capabilities": {"bounding": ["CAP_KILL"]},
                "oomScoreAdj": -998,
            },
            "linux": {
                "sysctl": {"a": "b"},
                "seccomp": {"syscalls": [{"names": ["read"], "action": "SCMP_ACT_ERRNO", "errnoRet": 38}]},
                "resources": {"memory": {"limit": 9, "disableOOMKiller": True}},
                "unknownMember": {"x": 1},
            },
        },
        "c1",
    )

    assert spec.Version == "1.1.0"
    assert spec.Process.User.UID == 1
    assert list(spec.Process.User.AdditionalGids) == [5]
    assert spec.Process.Rlimits[0].Hard == 2**64 - 1
    assert spec.Process.OOMScoreAdj == -998
    assert dict(spec.Linux.Sysctl) == {"a": "b"}
    assert spec.Linux.Seccomp.Syscalls[0].errnoret == 38
    assert spec.Linux.Resources.Memory.DisableOOMKiller


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ({"process": {"args": "sh"}}, "args"),
        ({"process": {"user": {"uid": -1}}}, "uid"),
        ({"process": {"user": 7}}, "user"),
        ({"linux": {"sysctl": {"a": 5}}}, "sysctl"),
        ({"mounts": [3]}, "mounts"),
        ({"process": {"rlimits": {"a": 1}}}, "rlimits"),
    ],
)
def test_a_member_that_does_not_fit_is_named(spec: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgument, match=f"spec of 'c1'.*{named}"):
        translate.spec(spec, "c1")


def test_network_values_keep_their_families() -> None:
    interface = translate.interface(
        NetworkInterface(
            name="eth0",
            addresses=(
                NetworkAddress(address="10.0.0.2", prefix_length=24),
                NetworkAddress(address="fd00::2", prefix_length=64),
            ),
            mtu=1400,
            mac="02:00:00:00:00:01",
            flags=0,
            type="veth",
            device_path="",
        )
    )
    route = translate.route(
        NetworkRoute(destination="", gateway="fd00::1", device="eth0", source="", scope=0, family=6, flags=0, mtu=0)
    )

    assert [(a.family, a.address, a.mask) for a in interface.IPAddresses] == [
        (0, "10.0.0.2", "24"),
        (1, "fd00::2", "64"),
    ]
    assert (route.family, route.gateway) == (1, "fd00::1")


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16383, 16384, 1 << 20, 3 << 20])
def test_stream_data_is_what_protobuf_says(size: int) -> None:
    data = bytes(index & 0xFF for index in range(min(size, 1000))).ljust(size, b"z")

    assert bytes(translate.stream_data(pb.ReadStreamResponse(data=data).SerializeToString())) == data


@pytest.mark.parametrize(
    ("payload", "data"),
    [
        pytest.param(b"\x0a\x01a\x0a\x02bc", b"bc", id="twice: the last counts"),
        pytest.param(b"\x10\x05\x0a\x01a", b"a", id="unknown field first"),
        pytest.param(b"\x0a\x01a\x10\x05", b"a", id="unknown field last"),
        pytest.param(b"\x0a\x81\x00a", b"a", id="a length longer than need be"),
    ],
)
def test_stream_data_in_an_odd_encoding(payload: bytes, data: bytes) -> None:
    assert bytes(translate.stream_data(payload)) == data


@pytest.mark.parametrize("payload", [b"\x0a", b"\x0a\x05ab", b"\x0a\xff\xff\xff\xff\xff", b"\x0a\x80"])
def test_stream_data_that_is_cut_is_refused(payload: bytes) -> None:
    with pytest.raises(DecodeError):
        translate.stream_data(payload)


@pytest.mark.parametrize(
    "address", [UnixAddress, SerialAddress, lambda path: HvsockAddress(path, 1024)], ids=["unix", "serial", "hvsock"]
)
def test_a_listener_that_has_no_room_is_waited_for(address: Callable[[str], AgentAddress], tmp_path: Path) -> None:
    """asyncio's own connect answers with a socket that is connected to nobody."""

    async def body() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                (await open_stream(address(path))).close()

    path = str(tmp_path / "agent")
    with crowded(path):
        asyncio.run(body())
