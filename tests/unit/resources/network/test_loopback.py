"""Every loopback port of a namespace answered by one socket, for real: namespaces of the test's own."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.nftables.main import NFTables

from pyshim.host import syscalls
from pyshim.host.fds import OwnedFd
from pyshim.model.errors import Unavailable
from pyshim.resources.network.host import loopback_steering
from pyshim.resources.network.host.loopback_listener import LoopbackConnection, LoopbackListener
from tests.fakes.namespaces import Namespace

pytestmark = pytest.mark.root
PROJECT = Path(__file__).parents[4]
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


def _port(listener: LoopbackListener) -> int:
    """The port that the listener itself has."""
    return int(listener._listener.getsockname()[1])


def _steered(namespace: Namespace) -> LoopbackListener:
    listener, steering = _inside(namespace, loopback_steering.steer_loopback)
    return LoopbackListener(OwnedFd(listener), OwnedFd(steering))


@pytest.mark.parametrize("address", ["127.0.0.1", "127.1.2.3", "::1"])
async def test_a_connection_to_any_loopback_port_arrives_with_that_port(namespace: Namespace, address: str) -> None:
    listener = _steered(namespace)
    try:
        for port in (1, 80, 40000, 65535, _port(listener)):
            with _dial(namespace, address, port) as client:
                connection = await asyncio.wait_for(listener.accept(), 10)
                assert connection.port == port
                await connection.write(b"hello")
                assert client.recv(5) == b"hello"
                client.sendall(b"bye")
                assert await connection.read() == b"bye"
                connection.close()
    finally:
        await listener.close()


def test_other_addresses_and_protocols_are_left_alone(namespace: Namespace) -> None:
    namespace.run("ip", "address", "add", "10.9.9.9/32", "dev", "lo")
    listener = _steered(namespace)
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
        asyncio.run(listener.close())


def test_nothing_is_steered_once_the_listener_is_closed(namespace: Namespace) -> None:
    listener = _steered(namespace)
    _dial(namespace, "127.0.0.1", 8080).close()

    asyncio.run(listener.close())
    asyncio.run(listener.close())

    with pytest.raises(ConnectionRefusedError):
        _dial(namespace, "127.0.0.1", 8080)


def _tables(namespace: Namespace) -> set[str]:
    def listed() -> set[str]:
        with NFTables(nfgen_family=socket.AF_UNSPEC) as nft:
            return {str(table.get_attr("NFTA_TABLE_NAME")) for table in nft.get_tables()}

    return _inside(namespace, listed)


def test_steering_ends_with_the_process_that_holds_it_and_other_tables_stay(namespace: Namespace) -> None:
    def make_other() -> None:
        with NFTables() as nft:
            nft.table("create", name="cni")
            nft.chain("create", table="cni", name="output", type="nat", hook="output", priority=-100)

    _inside(namespace, make_other)
    program = """if True:
        import time
        from pyshim.resources.network.host.loopback_steering import steer_loopback
        steer_loopback()
        print(flush=True)
        time.sleep(60)
    """
    inside = ("nsenter", f"--net={namespace.path}")
    command = [*inside, sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=PROJECT) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        while_held = _tables(namespace)
        _dial(namespace, "127.0.0.1", 8080).close()
        holder.kill()

    assert while_held == {"cni", "pyshim"}
    assert _tables(namespace) == {"cni"}
    with pytest.raises(ConnectionRefusedError):
        _dial(namespace, "127.0.0.1", 8080)


def test_a_second_sandbox_in_the_namespace_is_refused_and_the_first_goes_on(namespace: Namespace) -> None:
    listener = _steered(namespace)
    try:
        with pytest.raises(NetlinkError):
            _inside(namespace, loopback_steering.steer_loopback)
        _dial(namespace, "127.0.0.1", 8080).close()
    finally:
        asyncio.run(listener.close())


async def test_a_connection_that_was_not_redirected_is_not_taken_for_a_forwarded_one(namespace: Namespace) -> None:
    """Made to the listener itself while no rule is there: the kernel then has no original destination."""

    fd, steering = _inside(namespace, loopback_steering.steer_loopback)
    os.close(steering)
    listener = LoopbackListener(OwnedFd(fd), OwnedFd(os.open(os.devnull, os.O_RDONLY)))
    with _dial(namespace, "127.0.0.1", _port(listener)) as client:
        accepting = asyncio.create_task(listener.accept())
        assert await asyncio.get_running_loop().run_in_executor(None, client.recv, 1) == b""
        assert not accepting.done()
    await listener.close()
    accepting.cancel()
    with pytest.raises((Unavailable, asyncio.CancelledError)):
        await accepting


async def test_a_closed_listener_accepts_no_more_and_a_reset_is_seen(namespace: Namespace) -> None:
    listener = _steered(namespace)
    with _dial(namespace, "127.0.0.1", 8080) as client:
        connection: LoopbackConnection = await asyncio.wait_for(listener.accept(), 10)
        connection.reset()
        connection.reset()
        with pytest.raises(ConnectionResetError):
            client.recv(1)
    await listener.close()
    with pytest.raises(Unavailable):
        await listener.accept()


def test_a_kernel_that_refuses_nftables_says_so_at_once_and_no_descriptor_is_left(namespace: Namespace) -> None:
    """Here for want of a capability, which the kernel answers as it does a request for nf_tables it has not got."""
    program = """if True:
        import os
        from pyroute2.netlink.exceptions import NetlinkError
        from pyshim.resources.network.host.loopback_steering import steer_loopback
        before = set(os.listdir("/proc/self/fd"))
        try:
            steer_loopback()
        except NetlinkError as error:
            print(os.strerror(error.code), set(os.listdir("/proc/self/fd")) == before)
    """
    without = ("setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin")

    said = subprocess.run(
        ["nsenter", f"--net={namespace.path}", *without, sys.executable, "-c", program],
        cwd=PROJECT,
        capture_output=True,
        check=True,
        text=True,
        timeout=30,
    )

    assert said.stdout == "Operation not permitted True\n"
