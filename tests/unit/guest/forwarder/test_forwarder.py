"""The forwarder on this machine: real TLS over sockets of our own, with the peer's certificates."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from guest.forwarder import forward, material
from integration.remote.certificates import Authority

NAME = "podvm-test"
BIG = os.urandom(3 << 20)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def context(authority: Authority) -> ssl.SSLContext:
    server = authority.server(NAME)
    return forward.server_context(material.Keys(server.certificate, server.key, authority.certificate))


class Forwarded:
    """A connection at work: `net` is the client's end, `agent` the agent's; `asked` counts connections to the agent."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self.net, self._inner = socket.socketpair()
        self.agent, self._plain = socket.socketpair()
        self.asked = 0
        self.error: Exception | None = None
        self.may_connect = threading.Event()
        self.may_connect.set()
        self._context = context
        self.thread = threading.Thread(target=self._run)
        for sock in (self.net, self.agent):
            sock.settimeout(60)

    def client(self, authority: Authority) -> ssl.SSLSocket:
        """The client's end, after its part of the handshake."""
        return authority.client_context().wrap_socket(self.net, server_hostname=NAME)

    async def _connect(self) -> socket.socket:
        self.asked += 1
        await asyncio.to_thread(self.may_connect.wait, 60)
        return self._plain

    def _run(self) -> None:
        try:
            asyncio.run(forward.forward_connection(self._inner, self._context, self._connect))
        except OSError as error:
            self.error = error


@contextmanager
def forwarded(context: ssl.SSLContext) -> Iterator[Forwarded]:
    made = Forwarded(context)
    made.thread.start()
    try:
        yield made
    finally:
        made.net.close()
        made.agent.close()
        made.thread.join(60)
        made._plain.close()
        assert not made.thread.is_alive()


def read_exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (piece := sock.recv(count - len(data))):
        data += piece
    return data


def test_every_byte_arrives_in_both_directions_at_once(authority: Authority, context: ssl.SSLContext) -> None:
    with forwarded(context) as pair:
        client = pair.client(authority)
        backwards = BIG[::-1]
        got: dict[str, bytes] = {}
        work: list[Callable[[], object]] = [
            lambda: pair.agent.sendall(backwards),
            lambda: got.update(agent=read_exactly(pair.agent, len(BIG))),
        ]
        threads = [threading.Thread(target=one) for one in work]
        for thread in threads:
            thread.start()
        # The client reads nothing before it has sent everything: what comes its way must not stop what it says.
        client.sendall(BIG)
        got["client"] = read_exactly(client, len(backwards))
        for thread in threads:
            thread.join(60)
        client.close()

    assert got["agent"] == BIG
    assert got["client"] == backwards


def test_what_came_at_once_arrives_although_nothing_more_comes(
    authority: Authority, context: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is more than is decrypted at once, and the agent takes all of it: no event wakes the loop for the rest."""
    monkeypatch.setattr(forward, "_PIECE_BYTES", 1000)
    data = os.urandom(100_000)
    with forwarded(context) as pair:
        client = pair.client(authority)
        client.sendall(data)

        assert read_exactly(pair.agent, len(data)) == data
        client.close()


def test_what_came_at_once_arrives_before_the_clients_end(
    authority: Authority, context: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "_PIECE_BYTES", 1000)
    data = os.urandom(100_000)
    with forwarded(context) as pair:
        client = pair.client(authority)
        client.sendall(data)
        client.close()

        assert read_exactly(pair.agent, len(data) + 1) == data


def test_the_agents_end_reaches_the_client_after_its_last_bytes(authority: Authority, context: ssl.SSLContext) -> None:
    with forwarded(context) as pair:
        client = pair.client(authority)
        pair.agent.sendall(b"the last words")
        pair.agent.close()

        assert read_exactly(client, 100) == b"the last words"
        client.close()


def test_the_clients_end_reaches_the_agent_after_its_last_bytes(authority: Authority, context: ssl.SSLContext) -> None:
    with forwarded(context) as pair:
        client = pair.client(authority)
        client.sendall(b"the last words")
        client.close()

        assert read_exactly(pair.agent, 100) == b"the last words"


def test_what_the_client_said_arrives_although_it_has_gone_before_the_agents_words(
    authority: Authority, context: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "_PIECE_BYTES", 1000)
    data = os.urandom(50_000)
    with forwarded(context) as pair:
        pair.may_connect.clear()
        pair.agent.sendall(b"nobody hears this")
        client = pair.client(authority)
        client.sendall(data)
        client.close()
        pair.may_connect.set()

        assert read_exactly(pair.agent, len(data) + 1) == data


def refused_client(authority: Authority, tmp_path: Path, kind: str) -> ssl.SSLContext:
    """A client that trusts the server and has no right to be there."""
    client = ssl.create_default_context(cadata=authority.certificate)
    if kind == "the key of a VM":
        issued = authority.server("podvm-other")
    elif kind == "a certificate of a stranger":
        return _trusting(Authority(tmp_path / "stranger").client_context(), authority)
    else:
        return client
    (tmp_path / "pem").write_text(issued.certificate + issued.key)
    client.load_cert_chain(tmp_path / "pem")
    return client


def _trusting(client: ssl.SSLContext, authority: Authority) -> ssl.SSLContext:
    client.load_verify_locations(cadata=authority.certificate)
    return client


@pytest.mark.parametrize("kind", ["no certificate", "the key of a VM", "a certificate of a stranger"])
def test_a_client_without_the_peers_certificate_never_reaches_the_agent(
    authority: Authority, context: ssl.SSLContext, tmp_path: Path, kind: str
) -> None:
    with forwarded(context) as pair:
        client = refused_client(authority, tmp_path, kind).wrap_socket(pair.net, server_hostname=NAME)
        with client, pytest.raises((ssl.SSLError, ConnectionError)):
            # In TLS 1.3 the client is done before the server has looked at its certificate: the alert comes after.
            client.recv(1)
        pair.thread.join(60)

        assert pair.asked == 0
        assert isinstance(pair.error, ssl.SSLError)


def test_bytes_that_are_no_tls_end_the_connection(context: ssl.SSLContext) -> None:
    with forwarded(context) as pair:
        pair.net.sendall(b"GET / HTTP/1.0\r\n\r\n")
        pair.thread.join(60)

        assert pair.asked == 0
        assert isinstance(pair.error, ssl.SSLError)


def test_what_the_agent_said_last_reaches_a_client_that_goes_on_talking(
    authority: Authority, context: ssl.SSLContext
) -> None:
    with forwarded(context) as pair:
        pair.may_connect.clear()
        client = pair.client(authority)
        client.sendall(b"more")
        pair.agent.sendall(b"the last words")
        pair.agent.close()  # nothing can be written to it, and there is something to be read
        pair.may_connect.set()

        assert read_exactly(client, 100) == b"the last words"
        client.close()


def test_a_silent_client_is_given_up(context: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "_HANDSHAKE_S", 0.05)
    with forwarded(context) as pair:
        pair.thread.join(60)

        assert str(pair.error) == "finish the TLS handshake: the client is silent"


@contextmanager
def serving(listener: socket.socket, agent: str, context: ssl.SSLContext) -> Iterator[None]:
    """`forward` at work on a loop in another thread."""
    loop = asyncio.new_event_loop()
    task = loop.create_task(forward.forward(listener, agent, context))
    thread = threading.Thread(target=loop.run_until_complete, args=(asyncio.wait([task]),))
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(60)
        loop.close()


def test_one_connection_that_cannot_be_served_is_not_the_end_of_all(
    authority: Authority, context: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Any process of a container can take the guest's memory for a moment; there is no other way to the agent."""
    accept, failures = asyncio.SelectorEventLoop.sock_accept, [OSError(errno.EMFILE, "too many files")]

    async def failing(self: asyncio.SelectorEventLoop, sock: socket.socket) -> tuple[socket.socket, object]:
        if failures:
            raise failures.pop()
        return await accept(self, sock)

    monkeypatch.setattr(asyncio.SelectorEventLoop, "sock_accept", failing)
    monkeypatch.setattr(forward, "_REST_S", 0.0)
    monkeypatch.setattr(forward, "MAX_CONNECTIONS", 2)
    agent = socket.socket(socket.AF_UNIX)
    agent.bind(str(tmp_path / "agent.sock"))
    agent.listen()
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    with agent, listener, serving(listener, str(tmp_path / "agent.sock"), context):
        silent = [socket.create_connection(address) for _ in range(2)]
        refused = socket.create_connection(address)
        assert refused.recv(1) == b"", "refused, not left waiting"
        for one in (*silent, refused):
            one.close()
        client = None
        while client is None:
            raw = socket.create_connection(address)
            try:  # the places of the silent ones are free in a moment
                client = authority.client_context().wrap_socket(raw, server_hostname=NAME)
            except OSError:
                raw.close()
        client.sendall(b"hello")
        plain, _ = agent.accept()
        assert read_exactly(plain, 5) == b"hello"
        client.close()
        plain.close()


def test_a_disk_is_found_by_its_serial_number(tmp_path: Path) -> None:
    for name, serial in (("vda", "root"), ("vdb", material.CONFIG_DISK), ("loop0", None)):
        (tmp_path / name).mkdir()
        if serial:
            (tmp_path / name / "serial").write_text(serial)

    assert material.disk_with_serial(material.CONFIG_DISK, str(tmp_path)) == "/dev/vdb"
    assert material.disk_with_serial(material.IMAGES_DISK, str(tmp_path)) is None


def test_a_key_that_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "apf.json").write_text('{"tls-server-cert": "x", "tls-server-key": 5}')

    with pytest.raises(ValueError, match="it has no 'tls-server-key'"):
        material.read_keys(str(tmp_path / "apf.json"))
