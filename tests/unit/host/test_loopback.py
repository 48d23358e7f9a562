"""Every loopback port of a namespace answered by one socket, for real: namespaces of the test's own."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

from pyshim.host import syscalls
from pyshim.host.fds import OwnedFd
from pyshim.host.network import loopback_steering
from pyshim.host.network.loopback_door import LoopbackConnection, LoopbackDoor
from pyshim.model.errors import Unavailable
from tests.fakes.namespaces import Namespace

pytestmark = pytest.mark.root
T = TypeVar("T")


@pytest.fixture
def namespace() -> Iterator[Namespace]:
    made = Namespace()
    made.run("ip", "link", "set", "lo", "up")
    try:
        yield made
    finally:
        made.close()


def _inside(namespace: Namespace, work: Callable[[], T]) -> T:
    """The result of `work`, done by a thread in the namespace."""
    results: list[T] = []
    failures: list[BaseException] = []

    def enter() -> None:
        try:
            with open(f"/proc/{namespace.pid}/ns/net", "rb") as file:
                syscalls.setns(file.fileno(), syscalls.CLONE_NEWNET)
            results.append(work())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join(30)
    if failures:
        raise failures[0]
    return results[0]


def _dial(namespace: Namespace, address: str, port: int) -> socket.socket:
    return _inside(namespace, lambda: socket.create_connection((address, port), timeout=10))


def _door(namespace: Namespace) -> LoopbackDoor:
    listener, steering = _inside(namespace, loopback_steering.steer_loopback)
    return LoopbackDoor(OwnedFd(listener), OwnedFd(steering))


@pytest.mark.parametrize("address", ["127.0.0.1", "127.1.2.3", "::1"])
def test_a_connection_to_any_loopback_port_arrives_with_that_port(namespace: Namespace, address: str) -> None:
    async def main() -> None:
        door = _door(namespace)
        try:
            for port in (1, 80, 40000, 65535):
                with _dial(namespace, address, port) as client:
                    connection = await asyncio.wait_for(door.accept(), 10)
                    assert connection.port == port
                    await connection.write(b"hello")
                    assert client.recv(5) == b"hello"
                    client.sendall(b"bye")
                    assert await connection.read() == b"bye"
                    connection.close()
        finally:
            door.close()

    asyncio.run(main())


def test_other_addresses_and_protocols_are_left_alone(namespace: Namespace) -> None:
    namespace.run("ip", "address", "add", "10.9.9.9/32", "dev", "lo")
    door = _door(namespace)
    try:
        with pytest.raises(ConnectionRefusedError):
            _dial(namespace, "10.9.9.9", 8080)

        def datagram() -> None:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
                client.connect(("127.0.0.1", 8080))
                client.settimeout(10)
                client.send(b"x")
                client.recv(1)

        with pytest.raises(ConnectionRefusedError):
            _inside(namespace, datagram)
    finally:
        door.close()


def test_nothing_is_steered_once_the_door_is_closed(namespace: Namespace) -> None:
    door = _door(namespace)
    _dial(namespace, "127.0.0.1", 8080).close()

    door.close()
    door.close()

    with pytest.raises(ConnectionRefusedError):
        _dial(namespace, "127.0.0.1", 8080)


def test_steering_ends_with_the_process_that_holds_it(namespace: Namespace) -> None:
    listener, steering = _inside(namespace, loopback_steering.steer_loopback)
    os.close(listener)
    os.close(steering)

    with pytest.raises(ConnectionRefusedError):
        _dial(namespace, "127.0.0.1", 8080)


def test_a_closed_door_accepts_no_more_and_a_reset_is_seen(namespace: Namespace) -> None:
    async def main() -> None:
        door = _door(namespace)
        with _dial(namespace, "127.0.0.1", 8080) as client:
            connection: LoopbackConnection = await asyncio.wait_for(door.accept(), 10)
            connection.reset()
            connection.reset()
            with pytest.raises(ConnectionResetError):
                client.recv(1)
        door.close()
        with pytest.raises(Unavailable):
            await door.accept()

    asyncio.run(main())


def test_a_kernel_without_such_programs_is_an_os_error_and_leaves_no_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_command: int, _attributes: bytes) -> int:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(loopback_steering, "_bpf", refuse)
    before = set(os.listdir("/proc/self/fd"))

    with pytest.raises(PermissionError):
        loopback_steering.steer_loopback()

    assert set(os.listdir("/proc/self/fd")) == before
