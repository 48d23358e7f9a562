"""Starts a part of pyshim as a child, asks it questions, and ends it.

Such a child is not in the ledger: it ends by itself when our end of its socket closes, also when the shim crashes.
"""

import asyncio
import os
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from pyshim.host.fds import OwnedFd
from pyshim.host.processes.children import PROGRAM_ENV, Child, Children
from pyshim.host.processes.launch import AS_THE_SHIM, Isolation
from pyshim.host.python_child.messages import SOCKET_FD, Inbox, encoded
from pyshim.host.waiting import until_readable
from pyshim.model.errors import Internal

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
