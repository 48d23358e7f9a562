"""The asyncio server: listeners, connections, and the life of handlers beyond both."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable, Coroutine, Mapping

from .connection import MAX_OPEN_STREAMS
from .framing import MAX_MESSAGE_BYTES
from .link import QUEUE_BYTES, ByteStream
from .session import Handler, Session, SessionLimits

_ACCEPTS_PER_TURN = 16
"""Connections accepted before other work of the loop has its turn."""
_ACCEPT_PAUSE_S = 1.0
"""Seconds without accepting after an error, mostly EMFILE."""
_FLUSH_S = 1.0
"""Seconds for a connection's last replies at the end of the server."""
MAX_CONNECTIONS = 128
"""Connections of one server: containerd has one, and each costs up to a message and 64 KiB."""


class Server:
    """Serves methods on any number of listeners and connections. Handlers belong to the server, not to connections."""

    def __init__(
        self,
        *,
        services: Mapping[str, Mapping[str, Handler]],
        log: logging.Logger | None = None,
        authorize: Callable[[socket.socket], None] | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        max_in_flight: int = MAX_OPEN_STREAMS,
        max_in_flight_bytes: int = 64 << 20,
        queue_bytes: int = QUEUE_BYTES,
        max_connections: int = MAX_CONNECTIONS,
        answers_at_deadline: bool = True,
        when_alone: Callable[[], None] | None = None,
    ) -> None:
        """`services` maps full service names to method tables; it is looked up at every request.

        `authorize` gets each connected socket before a byte is read and raises to refuse it.
        `max_in_flight` and `max_in_flight_bytes` bound the running handlers and their request payloads, per connection.
        Requests beyond are answered RESOURCE_EXHAUSTED, not delayed: behind calls that wait for an event, the call that
        causes the event must get through. Once `queue_bytes` of replies wait for a peer, nothing more is read from it.
        `when_alone` is called each time the last connection has ended.
        Connections beyond `max_connections` are closed at once.
        Without `answers_at_deadline` a deadline is the handler's own business, as with Go's ttrpc: it is answered what
        the handler returns, however late.
        """
        self._services = services
        self._log = log if log is not None else logging.getLogger(__name__)
        self._limits = SessionLimits(
            message_bytes=max_message_bytes,
            in_flight=max_in_flight,
            in_flight_bytes=max_in_flight_bytes,
            queue_bytes=queue_bytes,
            answers_at_deadline=answers_at_deadline,
        )
        self.draining = False
        """Set once by `shutdown`: new requests are answered UNAVAILABLE."""
        self._authorize = authorize
        self._max_connections = max_connections
        self._when_alone = when_alone
        self._stop_accepting = asyncio.Event()
        self._sessions: set[Session] = set()
        self._handlers: set[asyncio.Task[None]] = set()

    @property
    def connections(self) -> int:
        return len(self._sessions)

    async def serve(self, listener: socket.socket) -> None:
        """Accept on a listening stream socket until `shutdown` begins. Owns the listener: it is closed at the end."""
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        try:
            if not self.draining:
                loop.add_reader(listener, self._accept_ready, listener)
            await self._stop_accepting.wait()
        finally:
            loop.remove_reader(listener)
            listener.close()

    async def serve_connection(self, sock: socket.socket | ByteStream) -> None:
        """Serve one connected stream socket until it closes. Owns the socket. Handlers may still run afterwards.

        It may be another byte stream with a socket's methods, such as a serial port; `authorize` is not asked then.
        """
        session = self._open(sock)
        if session is not None:
            try:
                await session.wait_closed()
            finally:
                session.close()

    async def shutdown(self, grace_s: float) -> None:
        """Nothing of the server is left: no listener, no connection, no handler.

        Accepting stops at once. Running handlers get `grace_s` to end, then they are cancelled and their callers are
        answered CANCELLED. Every reply is handed to the kernel before its connection is closed, at most a second per
        connection. Not to be awaited by a handler, which it would wait for: let the handler wake another task.
        """
        if asyncio.current_task() in self._handlers:
            raise RuntimeError("shut down server: called by one of its handlers")
        self.draining = True
        self._stop_accepting.set()
        if self._handlers:
            await asyncio.wait(self._handlers, timeout=grace_s)
        for task in self._handlers:
            task.cancel()
        if self._handlers:
            await asyncio.wait(self._handlers)
        sessions = tuple(self._sessions)
        await asyncio.gather(*(session.flush_and_close(_FLUSH_S) for session in sessions))

    def _spawn(self, coroutine: Coroutine[object, object, None], name: str) -> asyncio.Task[None]:
        """A task owned by the server until it ends."""
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._handlers.add(task)
        task.add_done_callback(self._handlers.discard)
        return task

    def _session_closed(self, session: Session) -> None:
        self._sessions.discard(session)
        if not self._sessions and self._when_alone is not None:
            self._when_alone()

    def _accept_ready(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                sock, _address = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as exc:
                # Mostly EMFILE. The connection stays in the queue and keeps the listener readable: without a pause the
                # loop would spin.
                self._log.error("accept paused", extra={"error": errno.errorcode.get(exc.errno or 0, str(exc))})
                loop = asyncio.get_running_loop()
                loop.remove_reader(listener)
                loop.call_later(_ACCEPT_PAUSE_S, self._resume_accepting, listener)
                return
            self._open(sock)

    def _resume_accepting(self, listener: socket.socket) -> None:
        if listener.fileno() < 0 or self.draining:
            return
        loop = asyncio.get_running_loop()
        try:
            loop.add_reader(listener, self._accept_ready, listener)
        except OSError:  # such as ENOSPC: the user has too many watches
            loop.call_later(_ACCEPT_PAUSE_S, self._resume_accepting, listener)

    def _open(self, sock: socket.socket | ByteStream) -> Session | None:
        try:
            if len(self._sessions) >= self._max_connections:
                raise ConnectionRefusedError(f"{self._max_connections} connections are open already")
            if self._authorize is not None and isinstance(sock, socket.socket):
                self._authorize(sock)
            session = Session(
                sock,
                services=self._services,
                limits=self._limits,
                log=self._log,
                spawn=self._spawn,
                is_draining=lambda: self.draining,
                on_closed=self._session_closed,
            )
        except Exception as exc:
            # One refused peer must not end the listener.
            self._log.warning("connection refused", extra={"error": f"{type(exc).__name__}: {exc}"})
            sock.close()
            return None
        self._sessions.add(session)
        session.start()
        return session
