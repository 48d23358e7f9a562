"""The ttrpc edge: bytes to the peer's methods and back, and the place where faults strike.

Every connection has a server of its own, so that a handler has the connection to drop or to answer twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from protos import hypervisor_pb2 as pb
from pyshim.ttrpc import CallContext, Code, RemoteError, Server

from .faults import Action, Fault
from .peer import VERSION, Peer, Refused

log = logging.getLogger("remote.service")

SERVICE = "hypervisor.Hypervisor"
_Method = Callable[[bytes], Awaitable[bytes]]
_BYE_S = 1.0


class _Socket(socket.socket):
    """Sends what it is given once, or twice: a reply is one piece, as it is small."""

    doubles = False

    def send(self, data: Any, flags: int = 0) -> int:
        if self.doubles:
            self.doubles = False
            super().sendall(data, flags)
        return super().send(data, flags)


class _Dropped(Exception):
    """The connection is gone; an answer would reach no caller."""


class Service:
    """Serves one peer on one unix socket, from `serve` until it is cancelled."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._servers: set[Server] = set()
        self._connections: set[asyncio.Task[None]] = set()
        self._methods: dict[str, _Method] = {
            "Version": self._version,
            "CreateVM": self._create,
            "StartVM": self._start,
            "StopVM": self._stop,
        }

    async def serve(self, path: Path) -> None:
        """Connections to `path` are served; the path is gone when this ends."""
        loop = asyncio.get_running_loop()
        with _listener(path) as listener:
            try:
                while True:
                    sock, _ = await loop.sock_accept(listener)
                    task = loop.create_task(self._connection(sock), name="connection")
                    self._connections.add(task)
                    task.add_done_callback(self._connections.discard)
            finally:
                os.unlink(path)
                await asyncio.gather(*(server.shutdown(_BYE_S) for server in tuple(self._servers)))

    async def _connection(self, sock: socket.socket) -> None:
        client = _Socket(fileno=sock.detach())
        working: set[asyncio.Task[Any]] = set()

        def handler(method: str) -> Callable[[bytes, CallContext], Awaitable[bytes]]:
            async def handle(payload: bytes, _call: CallContext) -> bytes:
                task = asyncio.current_task()
                assert task is not None
                working.add(task)
                task.add_done_callback(working.discard)
                return await self._answer(method, payload, client)

            return handle

        # As the adaptor, in whose language a late answer is an answer.
        server = Server(
            services={SERVICE: {method: handler(method) for method in self._methods}}, answers_at_deadline=False
        )
        self._servers.add(server)
        try:
            await server.serve_connection(client)
            # Work goes on when its caller has gone away; so does this server until it has ended.
            await asyncio.gather(*working, return_exceptions=True)
        finally:
            self._servers.discard(server)

    async def _answer(self, method: str, payload: bytes, client: _Socket) -> bytes:
        log.info("--> %s (%d bytes)", method, len(payload))
        try:
            await self._strike(self._peer.faults.at(method, "before"), client)
            reply = await self._methods[method](payload)
            after = self._peer.faults.at(method, "after")
            await self._strike(after, client)
            if any(fault.action is Action.EMPTY for fault in after):
                reply = b""
            if any(fault.action is Action.TWICE for fault in after):
                client.doubles = True
        except Refused as error:
            log.info("<-- %s refused: %s", method, error)
            raise RemoteError(Code.UNKNOWN, str(error)) from error  # what a Go server makes of a plain error
        except _Dropped as error:
            log.info("<-- %s: connection dropped", method)
            raise RemoteError(Code.UNAVAILABLE, "dropped") from error
        log.info("<-- %s", method)
        return reply

    async def _strike(self, faults: tuple[Fault, ...], client: _Socket) -> None:
        for fault in faults:
            log.info("fault: %s", fault)
            match fault.action:
                case Action.ERROR:
                    raise Refused(fault.argument or "a fault")
                case Action.DELAY:
                    await asyncio.sleep(float(fault.argument))
                case Action.HANG:
                    await asyncio.Event().wait()
                case Action.DROP:
                    with contextlib.suppress(OSError):  # the caller has gone already
                        client.shutdown(socket.SHUT_RDWR)
                    raise _Dropped
                case Action.DIE:
                    os.kill(os.getpid(), signal.SIGKILL)

    async def _version(self, payload: bytes) -> bytes:
        pb.VersionRequest.FromString(payload)
        return pb.VersionResponse(version=VERSION).SerializeToString()

    async def _create(self, payload: bytes) -> bytes:
        request = pb.CreateVMRequest.FromString(payload)
        path = await self._peer.create(request.id, dict(request.annotations), request.networkNamespacePath)
        return pb.CreateVMResponse(agentSocketPath=path).SerializeToString()

    async def _start(self, payload: bytes) -> bytes:
        await self._peer.start(pb.StartVMRequest.FromString(payload).id)
        return pb.StartVMResponse().SerializeToString()

    async def _stop(self, payload: bytes) -> bytes:
        await self._peer.stop(pb.StopVMRequest.FromString(payload).id)
        return pb.StopVMResponse().SerializeToString()


def _listener(path: Path) -> socket.socket:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(before)
    listener.listen(128)
    listener.setblocking(False)
    return listener
