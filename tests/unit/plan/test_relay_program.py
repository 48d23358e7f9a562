"""The relay program, run on this machine as the guest would run it."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from pyshim.plan.relay_program import relay_program

pytestmark = pytest.mark.skipif(os.uname().machine != "x86_64", reason="the program is for x86-64")


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "relay"
    path.write_bytes(relay_program())
    path.chmod(0o755)
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


def test_alone_it_stays_and_uses_next_to_nothing(program: Path) -> None:
    with _relay(program) as relay:
        with pytest.raises(subprocess.TimeoutExpired):
            relay.wait(0.3)
        held_kib = int(Path(f"/proc/{relay.pid}/status").read_text().split("VmRSS:")[1].split()[0])

    assert held_kib < 64
    assert program.stat().st_size < 1024
