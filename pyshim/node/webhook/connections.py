"""Limits the number of connections: when all are taken, a new one takes the place of the oldest.

So a caller that only keeps connections open, in TLS' handshake, between requests or inside a body, locks no other
caller out.
"""

import asyncio
import gc
import logging
import socket
import ssl
from collections.abc import Callable

from aiohttp import web

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 48
"""Connections. An API server has a few open, and one for each call. Each takes up to 1.5 MB: TLS reads ahead."""
GRACE_S = 1.0
"""Seconds that a connection has before another one may take its place; a review takes milliseconds."""
COLLECTED_AT = 16
"""Connections after which ended ones are collected. asyncio's TLS transports are reference cycles, and Python counts
objects, not their bytes: by itself it would leave a hundred of them, with all that they read ahead."""
_PAUSE_S = 0.02
"""Seconds before the number is checked again, and before the next attempt without a free descriptor."""


class Connections:
    """Accepts connections for `server`. A busy one is closed only if all are busy."""

    def __init__(
        self, server: web.Server, is_busy: Callable[[object], bool], context: ssl.SSLContext, *, handshake_s: float
    ) -> None:
        self._server = server
        self._is_busy = is_busy
        self._context = context
        self._handshake_s = handshake_s
        self._handshakes: dict[asyncio.Task[None], float] = {}
        """The time at which each began, the oldest first."""
        self._since_s: dict[object, float] = {}
        """By protocol, the end of its handshake."""
        self._accepted = 0

    async def accept(self, listener: socket.socket) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await self._room()
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:
                log.warning("connection not accepted", extra={"error": error.strerror})
                await asyncio.sleep(_PAUSE_S)
                continue
            self._accepted += 1
            if self._accepted % COLLECTED_AT == 0:
                gc.collect()
            task = loop.create_task(self._shake_hands(sock), name="webhook/handshake")
            self._handshakes[task] = loop.time()
            task.add_done_callback(self._handshakes.pop)
            await asyncio.sleep(0)  # the task begins, and owns the socket from then on

    async def close(self) -> None:
        """No handshake is under way."""
        tasks = list(self._handshakes)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _room(self) -> None:
        """There are fewer than MAX_CONNECTIONS."""
        while len(self._handshakes) + len(self._server.connections) >= MAX_CONNECTIONS:
            self._evict(asyncio.get_running_loop().time() - GRACE_S)
            await asyncio.sleep(_PAUSE_S)

    def _evict(self, before_s: float) -> None:
        """One connection that began before that time is closed, if there is one."""
        there = self._server.connections  # the oldest first
        self._forget_ended()
        idle = [each for each in there if not self._is_busy(each)]
        for protocol in idle or there:
            if self._since_s.get(protocol, before_s) <= before_s:
                protocol.force_close()
                return
        for task, began_s in self._handshakes.items():
            if began_s <= before_s:
                task.cancel()
                return

    def _forget_ended(self) -> None:
        """No ended connection stays in memory: a node's probes alone make a million in a week."""
        there = self._server.connections
        self._since_s = {each: self._since_s[each] for each in there if each in self._since_s}

    async def _shake_hands(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            _, protocol = await loop.connect_accepted_socket(
                self._server, sock, ssl=self._context, ssl_handshake_timeout=self._handshake_s
            )
        except OSError as error:
            log.debug("handshake failed", extra={"error": str(error)})
        else:
            self._since_s[protocol] = loop.time()
            self._forget_ended()
