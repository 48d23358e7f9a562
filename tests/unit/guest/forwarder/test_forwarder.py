"""The forwarder on this machine: real TLS over sockets of our own, with the peer's certificates."""

from __future__ import annotations

import errno
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from guest.forwarder import fork, material, pump, serve
from guest.forwarder.pump import Pump
from integration.remote.certificates import Authority

NAME = "podvm-test"
BIG = os.urandom(3 << 20)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def context(authority: Authority) -> ssl.SSLContext:
    server = authority.server(NAME)
    return serve.server_context(material.Keys(server.certificate, server.key, authority.certificate))


class Forwarded:
    """A pump at work: `net` is the client's end, `agent` the agent's; `asked` counts connections to the agent."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self.net, inner = socket.socketpair()
        self.agent, self._plain = socket.socketpair()
        self.asked = 0
        self.error: Exception | None = None
        self.may_connect = threading.Event()
        self.may_connect.set()
        self._pump = Pump(inner, context)
        self.thread = threading.Thread(target=self._run)
        for sock in (self.net, self.agent):
            sock.settimeout(60)

    def client(self, authority: Authority) -> ssl.SSLSocket:
        """The client's end, once it and the pump have agreed."""
        return authority.client_context().wrap_socket(self.net, server_hostname=NAME)

    def _connect(self) -> socket.socket:
        self.asked += 1
        self.may_connect.wait(60)
        return self._plain

    def _run(self) -> None:
        try:
            self._pump.run(self._connect)
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
    """It is more than the pump decrypts in one go, and the agent takes that at once: no event wakes it for the rest."""
    monkeypatch.setattr(pump, "_FULL_BYTES", 1)
    data = os.urandom(100_000)
    with forwarded(context) as pair:
        client = pair.client(authority)
        client.sendall(data)

        assert read_exactly(pair.agent, len(data)) == data
        client.close()


def test_what_came_at_once_arrives_before_the_clients_end(
    authority: Authority, context: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pump, "_FULL_BYTES", 1)
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
    monkeypatch.setattr(pump, "_PIECE_BYTES", 1000)
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


class Over(Exception):
    """Ends what otherwise goes on for ever."""


def test_one_connection_that_cannot_be_served_is_not_the_end_of_all(
    context: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any process of a container can take the guest's last pid for a moment; nobody else can reach the agent."""
    forks = iter([OSError(errno.EAGAIN, "no more processes"), Over()])
    accepts = iter([OSError(errno.EMFILE, "too many files"), None, None])

    def fork() -> int:
        raise next(forks)

    class Listener:
        def accept(self) -> tuple[socket.socket, tuple[str, int]]:
            if (error := next(accepts)) is not None:
                raise error
            ours, theirs = socket.socketpair()
            clients.append(ours)
            served.append(theirs)
            return theirs, ("10.0.2.2", 1)

    clients: list[socket.socket] = []
    served: list[socket.socket] = []
    monkeypatch.setattr(os, "fork", fork)
    monkeypatch.setattr(serve, "_REST_S", 0.0)

    with pytest.raises(Over):
        serve.forward(Listener(), "/none", context)  # type: ignore[arg-type]

    assert clients[0].recv(1) == b"", "refused, not left waiting"
    for sock in (*clients, *served):
        sock.close()


@pytest.mark.parametrize(
    ("command_line", "found"),
    [
        ("quiet forwarder.port=15150 agent.server_addr=unix:///run/a.sock", (15150, "", "/run/a.sock")),
        (
            "forwarder.address=10.0.2.15/24 forwarder.port=1 agent.server_addr=unix:///a",
            (1, "10.0.2.15/24", "/a"),
        ),
        ("agent.server_addr=unix:///run/a.sock", None),
        ("forwarder.port=15150", None),
        ("forwarder.port=0 agent.server_addr=unix:///a", None),
        ("forwarder.port=65536 agent.server_addr=unix:///a", None),
        ("forwarder.port=x agent.server_addr=unix:///a", None),
        ("forwarder.port=15150 agent.server_addr=vsock://-1:1024", None),
    ],
)
def test_the_command_line_decides_about_the_forwarder(command_line: str, found: tuple[int, str, str] | None) -> None:
    words = fork.parse(command_line)

    assert (words and (words.port, words.address, words.agent)) == found


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
