"""Children that run a part of pyshim in a process of their own: in another namespace, or with heavy libraries.

Both sides send messages in JSON, each under its length, with descriptors. `PythonChild` is the shim's side.
"""

import array
import asyncio
import json
import os
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from pyshim.host.fds import OwnedFd, until_readable
from pyshim.host.processes.children import PROGRAM_ENV, Child, Children
from pyshim.host.processes.launch import AS_THE_SHIM, Isolation
from pyshim.model.errors import Internal

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


_IMPORT_PATH = "import sys; sys.path += [path for path in sys.argv[1:] if path not in sys.path]"
_EXIT_TIMEOUT_S = 1.0


def python_command(statement: str) -> tuple[str, ...]:
    """Runs the statement with the shim's interpreter and import path, without site-packages (`-S`)."""
    return (sys.executable, "-I", "-S", "-c", f"{_IMPORT_PATH}; {statement}", *map(os.path.abspath, sys.path))


async def spawn_python(
    children: Children,
    module: str,
    *,
    kind: socket.SocketKind = socket.SOCK_STREAM,
    env: Mapping[str, str] = PROGRAM_ENV,
    isolation: Isolation = AS_THE_SHIM,
) -> tuple[Child, socket.socket]:
    """`main` of the module runs in a child; its SOCKET_FD is the other end of the socket, which is ours.

    Raises SpawnFailed.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    ours.setblocking(False)
    try:
        with theirs:
            child = await children.spawn(
                python_command(f"from {module} import main; main()"),
                env=env,
                fds={SOCKET_FD: theirs.fileno()},
                isolation=isolation,
            )
    except BaseException:
        ours.close()
        raise
    return child, ours


class PythonChild:
    """Asks a child of `spawn_python`, one question at a time, until `close`."""

    def __init__(self, child: Child, connection: socket.socket) -> None:
        self._child = child
        self._connection = connection
        self._inbox = Inbox()

    async def close(self) -> None:
        """The child has ended. Idempotent."""
        self._connection.close()
        self._inbox.close()
        await self._child.end()

    async def ask(self, action: str, question: Mapping[str, Any]) -> tuple[dict[str, Any], list[OwnedFd]]:
        """The child's answer and the descriptors with it. Raises Internal naming `action` and how the child ended."""
        loop = asyncio.get_running_loop()
        with suppress(BrokenPipeError, ConnectionResetError):  # the end of the stream has the reason
            await loop.sock_sendall(self._connection, encoded(question))
        while True:
            try:
                message = self._inbox.next()
            except ValueError as error:
                raise Internal(f"{action}: the child's answer: {error}") from error
            if message is not None:
                return message
            if not await self._receive():
                with suppress(TimeoutError):
                    async with asyncio.timeout(_EXIT_TIMEOUT_S):
                        await self._child.wait()
                raise Internal(f"{action}: {self._child.describe_exit()}")

    async def _receive(self) -> bool:
        """Bytes have arrived; False at the end of the stream."""
        while True:
            try:
                return self._inbox.receive(self._connection)
            except ConnectionResetError:
                return False
            except BlockingIOError:
                await until_readable(self._connection)
