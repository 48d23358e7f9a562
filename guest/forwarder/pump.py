"""Copies between a TLS connection and a plain one until either ends. Neither can make it hold more than a little."""

from __future__ import annotations

import contextlib
import select
import ssl
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

_PIECE_BYTES = 256 << 10
_FULL_BYTES = 1 << 20
_HANDSHAKE_S = 60.0
_FLUSH_S = 10.0


class Pump:
    """The server's end of one TLS connection. Owns `connection`."""

    def __init__(self, connection: socket.socket, context: ssl.SSLContext) -> None:
        self._net = connection
        self._received, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._received, self._to_send, server_side=True)
        self._encrypted = b""
        self._plain = b""
        self._net_ended = False
        self._tls_ended = False
        self._net_watched = False

    def run(self, connect: Callable[[], socket.socket]) -> None:
        """All is copied that came from either side before it ended, and both are closed.

        `connect` makes the plain side, and is called only for a client that has shown who it is. Raises OSError, which
        ssl.SSLError is.
        """
        plain = None
        try:
            self._net.setblocking(False)
            self._handshake()
            plain = connect()
            plain.setblocking(False)
            self._copy(plain)
        finally:
            self._net.close()
            if plain is not None:
                plain.close()

    def _handshake(self) -> None:
        deadline = time.monotonic() + _HANDSHAKE_S
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._send()
                self._wait(deadline, "finish the TLS handshake")
            except ssl.SSLError:
                self._send()  # the alert that tells the client why
                raise
            else:
                self._send()
                return

    def _wait(self, deadline: float, what: str) -> None:
        """The net side has taken what it was sent or has given something; at the latest by `deadline`."""
        poll = select.poll()
        poll.register(self._net, select.POLLOUT | select.POLLIN if self._encrypted else select.POLLIN)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError(f"{what}: the client is silent")
        self._receive()
        self._send()

    def _copy(self, plain: socket.socket) -> None:
        plain_ended = False
        poll = select.poll()
        while True:
            is_all = self._decrypt()
            self._plain = _sent(plain, self._plain)
            self._send()
            if self._tls_ended and not self._plain:
                return
            if plain_ended:
                self._say_goodbye()
                return
            if not is_all and len(self._plain) < _FULL_BYTES:
                continue  # what is here already wakes no poll
            self._register(poll, plain)
            ready = dict(poll.poll())
            if ready.get(self._net.fileno(), 0) & ~select.POLLOUT:
                self._receive()
            if ready.get(plain.fileno(), 0) & ~select.POLLOUT:
                data = _read(plain)
                plain_ended = data == b""
                if data:
                    self._tls.write(data)

    def _register(self, poll: select.poll, plain: socket.socket) -> None:
        """A side is read while the other keeps up. An ended one is not looked at again: it would always be ready."""
        plain_events = select.POLLOUT * bool(self._plain) | select.POLLIN * (len(self._encrypted) < _FULL_BYTES)
        poll.register(plain, plain_events)
        if not self._net_ended:
            net_events = select.POLLOUT * bool(self._encrypted) | select.POLLIN * (len(self._plain) < _FULL_BYTES)
            poll.register(self._net, net_events)
            self._net_watched = True
        elif self._net_watched:
            poll.unregister(self._net)
            self._net_watched = False

    def _receive(self) -> None:
        data = _read(self._net)
        if data:
            self._received.write(data)
        elif data is not None:
            self._net_ended = True
            self._received.write_eof()

    def _decrypt(self) -> bool:
        """What was received lies in `_plain`: all of it (True), or as much as its limit lets.

        The client's goodbye, behind its last byte, ends the net side.
        """
        while len(self._plain) < _FULL_BYTES:
            try:
                data = self._tls.read(_PIECE_BYTES)
            except ssl.SSLWantReadError:
                return True
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                data = b""
            if not data:
                self._tls_ended = self._net_ended = True
                return True
            self._plain += data
        return False

    def _send(self) -> None:
        self._encrypted += self._to_send.read()
        self._encrypted = _sent(self._net, self._encrypted)

    def _say_goodbye(self) -> None:
        with contextlib.suppress(ssl.SSLError):  # the client's own goodbye is not waited for
            self._tls.unwrap()
        self._send()
        deadline = time.monotonic() + _FLUSH_S
        while self._encrypted and not self._net_ended:
            self._wait(deadline, "send the last bytes")


def _read(sock: socket.socket) -> bytes | None:
    """What there is to read; empty at the end, None when there is nothing yet."""
    try:
        return sock.recv(_PIECE_BYTES)
    except (BlockingIOError, InterruptedError):
        return None
    except ConnectionError:
        return b""


def _sent(sock: socket.socket, data: bytes) -> bytes:
    """What the kernel did not take of `data`. Nothing once the other end has gone: reading tells, behind its words."""
    while data:
        try:
            data = data[sock.send(data) :]
        except (BlockingIOError, InterruptedError):
            break
        except ConnectionError:
            return b""
    return data
