"""The shim's side of connections to a pod's loopback addresses: one listening socket for every port of a namespace.

The child in the namespace made the socket and the rule (`loopback_steering.py`); this module uses both on the loop.
"""

import asyncio
import errno
import socket
import struct

from pyshim.host.fds import OwnedFd
from pyshim.host.os_errors import os_errors
from pyshim.host.threads import thread_to_the_end
from pyshim.model.errors import Unavailable

READ_BYTES = 65536
_RESET = struct.pack("ii", 1, 0)
_ORIGINAL_DESTINATION = 80
"""SO_ORIGINAL_DST of linux/netfilter_ipv4.h, IP6T_SO_ORIGINAL_DST of linux/netfilter_ipv6/ip6_tables.h."""
_SOCKADDR_IN_BYTES, _SOCKADDR_IN6_BYTES = 16, 28
_PORT = struct.Struct("!2xH")
"""The start of both kinds of sockaddr: the family, and the port."""
_TRANSIENT_PAUSE_S = 0.1
_TRANSIENT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED})


class LoopbackConnection:
    """One connection that was made to `port` of the pod's loopback."""

    def __init__(self, connection: socket.socket) -> None:
        """Raises OSError for a connection that was not redirected to us."""
        self.port = _dialled_port(connection)
        self._socket = connection

    async def read(self) -> bytes:
        """The next bytes; empty at the end of the other side's stream. Raises Unavailable when it is gone."""
        with os_errors(f"read connection to port {self.port}", Unavailable):
            return await asyncio.get_running_loop().sock_recv(self._socket, READ_BYTES)

    async def write(self, data: bytes) -> None:
        """All of `data` is with the kernel, at the other side's pace. Raises Unavailable when it is gone."""
        with os_errors(f"write connection to port {self.port}", Unavailable):
            await asyncio.get_running_loop().sock_sendall(self._socket, data)

    def reset(self) -> None:
        """Closes it with a reset that the other side sees. No effect once it is closed."""
        if self._socket.fileno() >= 0:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self._socket.close()

    def close(self) -> None:
        """Closes it; bytes already written still arrive. Idempotent."""
        self._socket.close()


class LoopbackListener:
    """Implements the seam `ForwardListener`. Owns both descriptors; with `steering` closed the redirection is gone."""

    def __init__(self, listener: OwnedFd, steering: OwnedFd) -> None:
        self._listener = socket.socket(fileno=listener.steal())
        self._listener.setblocking(False)
        self._steering = steering

    async def accept(self) -> LoopbackConnection:
        """The next connection. Raises Unavailable once the listener is closed."""
        while True:
            try:
                connection, _ = await asyncio.get_running_loop().sock_accept(self._listener)
            except OSError as error:
                if error.errno not in _TRANSIENT:
                    raise Unavailable(f"accept connection to the pod's loopback: {error.strerror}") from error
                await asyncio.sleep(_TRANSIENT_PAUSE_S)
                continue
            try:
                return LoopbackConnection(connection)
            except OSError:
                connection.close()

    async def close(self) -> None:
        """The kernel steers no further connection here and refuses those that wait. Idempotent.

        In a thread: the kernel waits 5 to 30 ms, for an RCU grace period, before it frees the rule's table.
        """
        try:
            await thread_to_the_end(self._steering.close)
        finally:
            self._listener.close()


def _dialled_port(connection: socket.socket) -> int:
    """The port before the redirection. IPv4 may come on a socket of IPv6. Raises OSError."""
    if connection.family == socket.AF_INET or connection.getsockname()[0].startswith("::ffff:"):
        level, size = socket.IPPROTO_IP, _SOCKADDR_IN_BYTES
    else:
        level, size = socket.IPPROTO_IPV6, _SOCKADDR_IN6_BYTES
    port: int = _PORT.unpack_from(connection.getsockopt(level, _ORIGINAL_DESTINATION, size))[0]
    return port
