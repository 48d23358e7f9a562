"""The relay program, run on this machine as the guest would run it."""

from __future__ import annotations

import errno
import socket
import subprocess
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
