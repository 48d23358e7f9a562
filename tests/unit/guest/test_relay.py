"""The relay program, run on this machine as the guest would run it."""

from __future__ import annotations

import errno
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from pyshim.resources.network.plan.relay import BUILT_PROGRAM


@pytest.fixture
def program() -> Path:
    path = Path(BUILT_PROGRAM)
    if not path.exists():
        pytest.skip(f"'{path}' is not there: make setup builds it")
    return path


@contextmanager
def _relay(program: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([program, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def _listener(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family)
    listener.settimeout(30)
    return listener


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_it_carries_both_ways_and_the_end_of_each(program: Path, address: str) -> None:
    with closing(_listener(address)) as listener, _relay(program, str(listener.getsockname()[1])) as relay:
        connection, _ = listener.accept()
        with connection:
            assert relay.stdin is not None
            assert relay.stdout is not None
            relay.stdin.write(b"question" * 1000)
            relay.stdin.close()
            asked = b"".join(iter(lambda: connection.recv(65536), b""))
            connection.sendall(b"answer" * 20_000)
        answered = relay.stdout.read()

        assert asked == b"question" * 1000
        assert answered == b"answer" * 20_000
        assert relay.wait(30) == 0


def test_it_ends_when_the_listener_ends_though_the_client_says_nothing(program: Path) -> None:
    with closing(_listener("127.0.0.1")) as listener, _relay(program, str(listener.getsockname()[1])) as relay:
        listener.accept()[0].close()

        assert relay.wait(30) == 0


def test_without_a_listener_it_exits_with_connects_error(program: Path) -> None:
    with closing(_listener("127.0.0.1")) as listener:
        port = listener.getsockname()[1]

    assert subprocess.run([program, str(port)], check=False, timeout=30).returncode == errno.ECONNREFUSED


def test_an_open_port_of_ipv4_is_preferred(program: Path) -> None:
    with closing(_listener("127.0.0.1")) as ipv4:
        port = ipv4.getsockname()[1]
        with closing(socket.create_server(("::1", port), family=socket.AF_INET6)) as ipv6, _relay(program, str(port)):
            ipv4.accept()[0].close()
            ipv6.settimeout(0.1)
            with pytest.raises(TimeoutError):
                ipv6.accept()


def test_it_needs_no_file_but_itself(program: Path) -> None:
    assert b"/lib/ld" not in program.read_bytes()


def test_alone_it_stays_and_uses_next_to_nothing(program: Path) -> None:
    with _relay(program) as relay:
        with pytest.raises(subprocess.TimeoutExpired):
            relay.wait(0.3)
        private_kib = int(Path(f"/proc/{relay.pid}/status").read_text().split("RssAnon:")[1].split()[0])

    assert private_kib < 128
    assert program.stat().st_size < 1 << 20


@pytest.mark.root
def test_dns_queries_of_several_clients_are_numbered_and_answers_find_their_clients(program: Path) -> None:
    address = ("127.53.11.7", 53)
    with (
        _relay(program, "resolve", address[0]) as relay,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as first,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as second,
    ):
        assert relay.stdin is not None
        assert relay.stdout is not None
        asked = []
        for number, client in enumerate((first, second)):
            client.settimeout(30)
            client.connect(address)
            query = b"\xab\xcd" + bytes(10) + b"name %d" % number
            _send_once_it_listens(client, b"too short")
            client.send(query)
            length = int.from_bytes(relay.stdout.read(2))
            asked.append(relay.stdout.read(length))
        assert [message[2:] for message in asked] == [bytes(10) + b"name 0", bytes(10) + b"name 1"]
        assert asked[0][:2] != asked[1][:2], "both clients chose the same id"

        answers = b"".join(
            len(answer).to_bytes(2) + answer for answer in (message + b" answered" for message in reversed(asked))
        )
        for cut in (answers[:1], answers[1:20], answers[20:]):
            relay.stdin.write(cut)
            relay.stdin.flush()
        assert first.recv(100) == b"\xab\xcd" + bytes(10) + b"name 0 answered"
        assert second.recv(100) == b"\xab\xcd" + bytes(10) + b"name 1 answered"

        relay.stdin.close()
        assert relay.wait(30) == 0


def _send_once_it_listens(client: socket.socket, data: bytes) -> None:
    """A first datagram may find nobody; then the next call says so."""
    for _ in range(300):
        try:
            client.send(data)
            client.send(data)
        except ConnectionRefusedError:
            time.sleep(0.1)
        else:
            return
    raise AssertionError("the relay does not listen")
