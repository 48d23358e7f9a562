"""Connections to a pod's loopback addresses as the shim takes them: one listening socket for every port of a namespace.

The child in the namespace made socket and steering (`loopback_steering.py`); here they are only used, on the loop.
"""

import asyncio
import errno
import socket
import struct

from pyshim.host.fds import OwnedFd
from pyshim.model.errors import Unavailable

READ_BYTES = 65536
_RESET = struct.pack("ii", 1, 0)
_TRANSIENT_PAUSE_S = 0.1
_TRANSIENT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED})


class LoopbackConnection:
    """One connection somebody made to `port` of the pod's loopback."""

    def __init__(self, connection: socket.socket) -> None:
        self.port: int = connection.getsockname()[1]
        self._socket = connection

    async def read(self) -> bytes:
        """The next bytes; empty once the other side has said all. Raises Unavailable when it is gone."""
        try:
            return await asyncio.get_running_loop().sock_recv(self._socket, READ_BYTES)
        except OSError as error:
            raise Unavailable(f"read connection to port {self.port}: {error.strerror}") from error

    async def write(self, data: bytes) -> None:
        """All of `data` is with the kernel, at the other side's pace. Raises Unavailable when it is gone."""
        try:
            await asyncio.get_running_loop().sock_sendall(self._socket, data)
        except OSError as error:
            raise Unavailable(f"write connection to port {self.port}: {error.strerror}") from error

    def reset(self) -> None:
        """Gone, and the other side told that nobody was there. Nothing happens once it is closed."""
        if self._socket.fileno() >= 0:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self._socket.close()

    def close(self) -> None:
        """Gone; what was written still arrives. Idempotent."""
        self._socket.close()


class LoopbackDoor:
    """Implements the seam `Door`. Owns both descriptors."""

    def __init__(self, listener: OwnedFd, steering: OwnedFd) -> None:
        self._listener = socket.socket(fileno=listener.steal())
        self._listener.setblocking(False)
        self._steering = steering

    async def accept(self) -> LoopbackConnection:
        """The next connection. Raises Unavailable once the door is closed."""
        while True:
            try:
                connection, _ = await asyncio.get_running_loop().sock_accept(self._listener)
                return LoopbackConnection(connection)
            except OSError as error:
                if error.errno not in _TRANSIENT:
                    raise Unavailable(f"accept connection to the pod's loopback: {error.strerror}") from error
            await asyncio.sleep(_TRANSIENT_PAUSE_S)

    def close(self) -> None:
        """Nobody is steered here any more, and who waits is refused. Idempotent."""
        self._steering.close()
        self._listener.close()
