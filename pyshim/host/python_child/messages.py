"""Messages between the shim and a child: JSON, each under a length, with descriptors.

The shim asks, the child answers, one at a time. An answer is `{"ok": ...}` or `{"error": ...}`.
"""

import array
import json
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from pyshim.host.fds import OwnedFd

SOCKET_FD = 3
"""The socket's number in the child."""
LENGTH = struct.Struct("=I")
MAX_MESSAGE_BYTES = 4 << 20
"""Enough for some 15,000 routes; the namespace of a pod has fewer."""
MAX_FDS = 253
"""The kernel takes no more with one message (SCM_MAX_FD, unix(7)), so no tap has more queues; its own limit is 256."""
READ_BYTES = 65536


class MessageTooLong(ValueError):
    """More than MAX_MESSAGE_BYTES."""


def encoded(message: Mapping[str, Any]) -> bytes:
    """The message as it goes over the socket. Raises MessageTooLong."""
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > MAX_MESSAGE_BYTES:
        raise MessageTooLong(f"{len(body)} bytes, at most {MAX_MESSAGE_BYTES}")
    return LENGTH.pack(len(body)) + body


class Inbox:
    """Bytes and descriptors as they arrive, until they are a message."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._fds: list[OwnedFd] = []

    def receive(self, connection: socket.socket) -> bool:
        """Reads the bytes that the socket has; False at its end. Raises BlockingIOError when it has none yet."""
        space = socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize)
        data, ancillary, _flags, _address = connection.recvmsg(READ_BYTES, space, socket.MSG_CMSG_CLOEXEC)
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                numbers.frombytes(payload[: len(payload) - len(payload) % numbers.itemsize])
                self._fds += [OwnedFd(number) for number in numbers]
        self._data += data
        return bool(data)

    def next(self) -> tuple[dict[str, Any], list[OwnedFd]] | None:
        """The next whole message and the descriptors that came with it; None when some of it is still to come.

        Raises ValueError for a message that is too long or not a JSON object.
        """
        if len(self._data) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(self._data)
        if length > MAX_MESSAGE_BYTES:
            raise MessageTooLong(f"{length} bytes, at most {MAX_MESSAGE_BYTES}")
        if len(self._data) < LENGTH.size + length:
            return None
        try:
            message = json.loads(bytes(self._data[LENGTH.size : LENGTH.size + length]))
        except RecursionError as error:
            raise ValueError("nested too deep") from error
        if not isinstance(message, dict):
            raise ValueError("not an object")
        del self._data[: LENGTH.size + length]
        fds, self._fds = self._fds, []
        return message, fds

    def wait(self, connection: socket.socket) -> tuple[dict[str, Any], list[OwnedFd]] | None:
        """`next` of a blocking socket; None at its end."""
        while (message := self.next()) is None:
            if not self.receive(connection):
                return None
        return message

    def close(self) -> None:
        """Descriptors that were not taken are closed; idempotent."""
        while self._fds:
            self._fds.pop().close()


def send(connection: socket.socket, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
    """The message is in the (blocking) socket, the descriptors with its first byte."""
    data = encoded(message)
    sent = socket.send_fds(connection, [data], list(fds)) if fds else 0
    connection.sendall(data[sent:])
