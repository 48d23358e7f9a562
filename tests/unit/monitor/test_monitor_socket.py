"""The monitor socket, asked as CSI drivers ask it, and by clients that know no HTTP."""

import asyncio
import json
import os
import select
import socket
import stat
import subprocess
import sys
import tempfile
from http import HTTPStatus
from pathlib import Path

import pytest

from pyshim.model.errors import FailedPrecondition
from pyshim.monitor.socket import HttpReply, HttpRequest, MonitorSocket
from pyshim.node.cli.direct_volume import add, ask
from pyshim.node.cli.monitor import exchange
from tests.unit.monitor.monitored import FakePod, said, served


async def test_statistics_are_the_agents_words(path: str) -> None:
    request = b"GET /direct-volume/stats?path=%2Fvar%2Flib%2Fa%20b%3Fc HTTP/1.1\r\nHost: shim\r\n\r\n"

    status, body = await said(path, request)

    assert status == 200
    assert json.loads(body) == {
        "usage": [{"available": 100, "total": 100, "unit": 1}],
        "volume_condition": {"message": "OK"},
    }
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


async def test_a_resize_is_passed_on(path: str, pod: FakePod) -> None:
    body = b'{"VolumePath": "/v", "Size": 4096}'
    head = b"POST /direct-volume/resize HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body)

    assert await said(path, head + body) == (200, b"")
    assert pod.resized == [("/v", 4096)]


_POST = b"POST /direct-volume/resize HTTP/1.1\r\nContent-Length: "


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /direct-volume/stats?path=/none HTTP/1.1\r\n\r\n", 404),
        (b"GET /direct-volume/stats HTTP/1.1\r\n\r\n", 400),
        (b"POST /direct-volume/stats?path=/v HTTP/1.1\r\n\r\n", 405),
        (b"GET /direct-volume/resize HTTP/1.1\r\n\r\n", 405),
        (b"GET /metric HTTP/1.1\r\n\r\n", 404),
        (b"POST /metrics HTTP/1.1\r\n\r\n", 405),
        (b"DELETE /iptables HTTP/1.1\r\n\r\n", 405),
        (b"GET /policy HTTP/1.1\r\n\r\n", 405),
        (b"PUT /policy HTTP/1.1\r\nContent-Length: 1\r\n\r\n\xff", 400),
        (b"PUT /policy HTTP/1.1\r\nContent-Length: 1073741824\r\n\r\n", 413),
        (_POST + b"9" * 10_000 + b"\r\n\r\n", 400),
        (b"hello\r\n\r\n", 400),
        (_POST + b"2\r\n\r\n{}", 400),
        (_POST + b"2\r\n\r\n[]", 400),
        (_POST + b"32\r\n\r\n" + b'{"VolumePath": 7, "Size": "big"}', 400),
        (_POST + b"-1\r\n\r\n", 400),
        (_POST + b"999999999\r\n\r\n", 413),
        (b"POST /direct-volume/resize HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n", 400),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_a_failed_request_has_a_status(request_bytes: bytes, status: int, path: str, pod: FakePod) -> None:
    assert (await said(path, request_bytes))[0] == status
    assert pod.resized == []


async def test_the_address_is_in_a_file(tmp_path: Path, path: str) -> None:
    assert (tmp_path / "monitor_address").read_text() == f"unix://{path}"
    assert await said(path, b"GET /agent-url HTTP/1.1\r\n\r\n") == (200, b"vsock://3:1024")


@pytest.mark.parametrize(("target", "ipv6"), [("/iptables", False), ("/ip6tables", True)])
async def test_iptables_are_the_guests(target: str, ipv6: bool, path: str, pod: FakePod) -> None:
    put = f"PUT {target} HTTP/1.1\r\nContent-Length: 7\r\n\r\n*filter".encode()

    assert await said(path, put) == (200, b"")
    assert pod.tables == {ipv6: b"*filter"}
    assert await said(path, f"GET {target} HTTP/1.1\r\n\r\n".encode()) == (200, b"*filter")


async def test_a_policy_reaches_the_guest_also_from_a_client_that_asks_first(path: str, pod: FakePod) -> None:
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(b"PUT /policy HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 7\r\n\r\n")
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(b"package")
    assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
    assert pod.policy == "package"
    writer.close()


async def test_clients_that_say_nothing_keep_out_others_only_for_a_while(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr("pyshim.monitor.socket.REQUEST_TIMEOUT_S", 1.0)
    monkeypatch.setattr("pyshim.monitor.socket.MAX_CLIENTS", 1)

    reader, writer = await asyncio.open_unix_connection(path)
    with pytest.raises(FailedPrecondition, match="too many clients"):
        await asyncio.to_thread(exchange, path, "GET", "/agent-url")
    assert await reader.read() == b"", "cut"
    writer.close()
    assert (await said(path, b"GET /agent-url HTTP/1.1\r\n\r\n"))[0] == 200


async def test_a_client_that_does_not_read_is_cut(monkeypatch: pytest.MonkeyPatch, path: str, pod: FakePod) -> None:
    monkeypatch.setattr("pyshim.monitor.socket.REQUEST_TIMEOUT_S", 0.5)

    pod.tables[False] = b"x" * (8 << 20)
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(path)
    sock.sendall(b"GET /iptables HTTP/1.1\r\n\r\n")
    hung_up = select.poll()
    hung_up.register(sock, 0)
    assert await asyncio.to_thread(hung_up.poll, 30_000), "the shim has closed"

    received = 0
    while data := await asyncio.to_thread(sock.recv, 1 << 20):
        received += len(data)
    sock.close()
    assert received < 8 << 20


async def test_a_client_that_leaves_early_disturbs_no_other(path: str) -> None:
    _, writer = await asyncio.open_unix_connection(path)
    writer.write(b"GET /")
    writer.close()
    assert (await said(path, b"GET /x HTTP/1.1\r\n\r\n"))[0] == 404


async def test_there_is_no_moment_in_which_others_could_connect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    bind = socket.socket.bind

    def observed(listener: socket.socket, address: str) -> None:
        bind(listener, address)
        seen.append(stat.S_IMODE(os.stat(address).st_mode))

    monkeypatch.setattr(socket.socket, "bind", observed)
    before = os.umask(0)
    try:
        async with served(tmp_path) as (path, _):
            seen.append(stat.S_IMODE(os.stat(path).st_mode))
    finally:
        os.umask(before)

    assert seen == [0o600, 0o600]


async def test_the_operators_command_asks_the_same_way(tmp_path: Path) -> None:
    records, states = tmp_path / "records", tmp_path / "sbs"
    (states / "s1").mkdir(parents=True)
    volume = "/var/lib/a b?c"
    add(volume, '{"volume-type": "block", "device": "/dev/x", "fstype": "ext4"}', records=str(records))
    (next(records.iterdir()) / "s1").touch()

    async with served(states / "s1"):
        target = "/direct-volume/stats?path=%2Fvar%2Flib%2Fa%20b%3Fc"
        answer = await asyncio.to_thread(ask, volume, "GET", target, "", records=str(records), state_dir=str(states))
        assert json.loads(answer)["volume_condition"] == {"message": "OK"}


async def test_debug_paths_exist_only_where_they_are_enabled(tmp_path: Path) -> None:
    def asked(path: str) -> bytes:
        return f"GET {path} HTTP/1.1\r\n\r\n".encode()

    async with served(tmp_path) as (path, _):
        assert await said(path, asked("/debug/stacks")) == (404, b"no such path (hint: enable_pprof in [runtime])")

    debug = {"stacks": lambda: "task a\n", "broken": lambda: str(1 // 0)}
    async with served(tmp_path, debug) as (path, _):
        assert await said(path, asked("/debug/stacks")) == (200, b"task a\n")
        assert (await said(path, b"POST /debug/stacks HTTP/1.1\r\n\r\n"))[0] == 405
        assert (await said(path, asked("/debug/pprof/heap")))[0] == 404
        status, words = await said(path, asked("/debug/broken"))
        assert (status, words) == (500, b"ZeroDivisionError")


_CONNECT = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
_GROUP = 54321


def _connects(path: Path, group: int) -> bool:
    """A process of another user, in this group, reaches the socket."""
    done = subprocess.run(
        ["/usr/bin/python3", "-c", _CONNECT, str(path)],
        user=65534,
        group=group,
        extra_groups=[],
        stderr=subprocess.PIPE,
        check=False,
    )
    assert done.returncode == 0 or b"PermissionError" in done.stderr
    return done.returncode == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
async def test_the_group_of_the_directory_reaches_the_metrics_socket_and_no_other() -> None:
    async def answer(_: HttpRequest) -> HttpReply:
        return HttpReply(HTTPStatus.OK)

    with tempfile.TemporaryDirectory() as directory:
        root, metrics = Path(directory), Path(directory, "metrics")
        root.chmod(0o755)
        metrics.mkdir()
        os.chown(metrics, 0, _GROUP)
        metrics.chmod(0o2750)
        pair = (MonitorSocket(str(root / "kata.sock"), answer), MonitorSocket(str(metrics / "s1"), answer, mode=0o660))
        for each in pair:
            await each.open()
        tries = [(metrics / "s1", _GROUP), (metrics / "s1", 65534), (root / "kata.sock", _GROUP)]
        found = [await asyncio.to_thread(_connects, *each) for each in tries]
        for each in pair:
            await each.close()

    assert found == [True, False, False]


_OF_ROOT = """
import socket, sys
from pyshim.host import syscalls
if sys.argv[2] == "bare":
    syscalls.limit_capabilities_of_thread(())
with socket.socket(socket.AF_UNIX) as caller:
    print("connected" if caller.connect_ex(sys.argv[1]) == 0 else "refused")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: others are refused anyway")
async def test_a_process_of_root_without_capabilities_only_reaches_the_socket_that_takes_no_orders() -> None:
    """As the pod of the NRI plugin, which sees the directory of the states."""

    async def answer(_: HttpRequest) -> HttpReply:
        return HttpReply(HTTPStatus.OK)

    async def tried(path: str, kind: str) -> str:
        words = (sys.executable, "-c", _OF_ROOT, path, kind)
        return (await asyncio.to_thread(subprocess.check_output, words, text=True)).strip()

    with tempfile.TemporaryDirectory() as directory:
        pair = MonitorSocket(f"{directory}/kata", answer, mode=0), MonitorSocket(f"{directory}/s1", answer, mode=0o660)
        for each in pair:
            await each.open()
        found = [await tried(f"{directory}/{name}", kind) for name in ("kata", "s1") for kind in ("control", "bare")]
        for each in pair:
            await each.close()

    assert found == ["connected", "refused", "connected", "connected"]
