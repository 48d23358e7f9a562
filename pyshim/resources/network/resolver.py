"""Name resolution by the caller's resolver: the guest's queries are answered by the one in the pod's namespace.

Docker answers the DNS queries of a container on a network that the user made at 127.0.0.11 in the container's network
namespace, on the host. In the guest nothing is there. So the relay takes the queries at that address in the guest, the
streams that every agent offers carry them, and a socket in the namespace asks the resolver. An answer finds its query
in the guest: here messages only pass.
"""

import asyncio
import logging
import socket
import struct
from collections.abc import Awaitable, Callable, Iterator

from pyshim.concurrency.tasks import cancel_all
from pyshim.model.errors import ShimError
from pyshim.model.seams import ContainerAgent
from pyshim.resources.network.plan.network import RESOLVER_ADDRESS
from pyshim.resources.network.plan.relay import resolver_process
from pyshim.resources.network.relay import GuestRelay
from pyshim.resources.services import VmServices

log = logging.getLogger(__name__)

MAX_ANSWERS = 64
"""Answers that wait for the guest; more are dropped, as datagrams may be."""
_READ_BYTES = 1 << 16
_EXEC_ID = "resolver"
_LENGTH = struct.Struct("!H")
"""Precedes each message on the relay's streams, as DNS over TCP has it. Source: RFC 1035, 4.2.2."""


class Resolver:
    """Serves the guest from the first `follow` that finds a resolver until `close`."""

    def __init__(
        self,
        services: VmServices,
        *,
        connect: Callable[[], Awaitable[int | None]],
        relay: GuestRelay,
        agent: ContainerAgent,
    ) -> None:
        """`connect` gives the fd of a socket of the namespace, connected to the resolver there; None without one."""
        self._sandbox_id = services.plan.sandbox_id
        self._tasks = services.tasks
        self._connect = connect
        self._relay = relay
        self._agent = agent
        self._serving: asyncio.Task[None] | None = None

    async def follow(self) -> None:
        """If the namespace has a resolver by now, the guest has it, too. A failure is logged."""
        if self._serving is not None and not self._serving.done():
            return
        try:
            fd = await self._connect()
            if fd is None:
                return
            upstream = socket.socket(fileno=fd)
            try:
                container_id = await self._relay.container()
                await self._agent.exec_process(container_id, _EXEC_ID, resolver_process(RESOLVER_ADDRESS))
            except BaseException:
                upstream.close()
                raise
        except ShimError as exc:
            log.warning("names are not resolved", extra={"sandbox": self._sandbox_id, "error": str(exc)})
            return
        log.info("resolver connected", extra={"sandbox": self._sandbox_id, "address": RESOLVER_ADDRESS})
        self._serving = self._tasks.supervise(f"resolver/{self._sandbox_id}", self._serve(container_id, upstream))

    async def close(self) -> None:
        """No further query is carried. Idempotent."""
        if self._serving is not None:
            await cancel_all(self._serving)

    async def _serve(self, container_id: str, upstream: socket.socket) -> None:
        answers: asyncio.Queue[bytes] = asyncio.Queue(MAX_ANSWERS)
        side = await _Upstream.open(upstream, answers)
        answering = self._tasks.spawn(f"resolver/{self._sandbox_id}/out", self._answer(container_id, answers))
        try:
            unread = b""
            while data := await self._agent.read_stdout(container_id, _EXEC_ID, _READ_BYTES):
                *queries, unread = split_messages(unread + data)
                if side.is_refused:  # dockerd was restarted, and its resolver has another port
                    side = await self._again(side, answers)
                for query in queries:
                    side.send(query)
        except ShimError as exc:
            log.debug("resolver ended", extra={"sandbox": self._sandbox_id, "error": str(exc)})
        finally:
            side.close()
            await cancel_all(answering)

    async def _again(self, side: "_Upstream", answers: asyncio.Queue[bytes]) -> "_Upstream":
        """A new connection to the resolver, in place of one that it refused; the old one if there is none yet."""
        try:
            fd = await self._connect()
        except ShimError as exc:
            log.debug("reconnect resolver", extra={"sandbox": self._sandbox_id, "error": str(exc)})
            return side
        if fd is None:
            return side
        side.close()
        return await _Upstream.open(socket.socket(fileno=fd), answers)

    async def _answer(self, container_id: str, answers: asyncio.Queue[bytes]) -> None:
        while True:
            message = await answers.get()
            left = memoryview(_LENGTH.pack(len(message)) + message)
            while left:
                left = left[await self._agent.write_stdin(container_id, _EXEC_ID, left) :]


class _Upstream(asyncio.DatagramProtocol):
    """A connected socket of the pod's namespace; its answers go into a queue."""

    def __init__(self, answers: asyncio.Queue[bytes]) -> None:
        self._answers = answers
        self._transport: asyncio.DatagramTransport | None = None
        self.is_refused = False
        """Nothing listens at the other side."""

    @classmethod
    async def open(cls, upstream: socket.socket, answers: asyncio.Queue[bytes]) -> "_Upstream":
        """Owns the socket."""
        _, made = await asyncio.get_running_loop().create_datagram_endpoint(lambda: cls(answers), sock=upstream)
        return made

    def connection_made(self, transport: asyncio.DatagramTransport) -> None:  # type: ignore[override]
        self._transport = transport

    def datagram_received(self, data: bytes, _address: object) -> None:
        if not self._answers.full():
            self._answers.put_nowait(data)

    def error_received(self, exc: Exception) -> None:
        self.is_refused = self.is_refused or isinstance(exc, ConnectionRefusedError)

    def send(self, query: bytes) -> None:
        if self._transport is not None:
            self._transport.sendto(query)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def split_messages(data: bytes) -> Iterator[bytes]:
    """Each message that is there whole, then the bytes after the last one."""
    while len(data) >= _LENGTH.size and len(data) >= _LENGTH.size + (length := _LENGTH.unpack_from(data)[0]):
        yield data[_LENGTH.size : _LENGTH.size + length]
        data = data[_LENGTH.size + length :]
    yield data
