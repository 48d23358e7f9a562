"""The monitor socket as an HTTP server: one request for each connection, limited in time and size.

Only root with CAP_DAC_OVERRIDE can connect, and to the socket in METRICS_DIRECTORY every process of root and the group
of that directory. An HTTP library would be loaded into every shim (see the room's `__init__`), for a head, a body of
known length and one reply.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import NamedTuple

from pyshim.host.fds import listening_socket
from pyshim.model.observation import MAX_MONITOR_BODY_BYTES

log = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 10.0
"""Seconds for a client to send its request, and as many to take the reply."""
MAX_CLIENTS = 16
"""Connections at a time: kata-monitor, `pyshim monitor`, a CSI driver and some operators."""
_REFUSAL_S = 0.2
"""Seconds for the request of one client too many."""
_MAX_HEAD_BYTES = 64 * 1024


class HttpRequest(NamedTuple):
    method: str
    target: str
    body: bytes


class HttpReply(NamedTuple):
    status: HTTPStatus
    body: bytes = b""
    content_type: str = "text/plain; charset=utf-8"
    allow: str = ""
    """The methods of the path, if the request's is not among them."""


Answer = Callable[[HttpRequest], Awaitable[HttpReply]]
"""Never raises but CancelledError."""


class MonitorSocket:
    """Serves `path` until `close`."""

    def __init__(self, path: str, answer: Answer, *, mode: int = 0o600, address_file: str = "") -> None:
        """`address_file` will hold the socket's address, as Kata's `monitor_address` in the bundle does."""
        self._mode = mode
        self._path = path
        self._address_file = address_file
        self._answer = answer
        self._clients = 0
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """The socket takes connections. Raises ShimError, OSError."""
        listener = listening_socket(self._path, mode=self._mode, backlog=MAX_CLIENTS)
        try:
            os.chmod(self._path, self._mode)  # bind(2) has applied the umask
            if self._address_file:
                _write(self._address_file, f"unix://{self._path}")
            self._server = await asyncio.start_unix_server(self._serve, sock=listener, limit=_MAX_HEAD_BYTES)
        except BaseException:
            listener.close()
            raise

    async def close(self) -> None:
        """The socket accepts no connection any more. Idempotent; the ledger's entry removes the file."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._clients += 1
        try:
            reply = await self._reply(reader, writer)
            writer.write(_head(reply) + reply.body)
            writer.transport.set_write_buffer_limits(0)  # `drain` then waits until all has left
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                await writer.drain()
        except (OSError, TimeoutError) as error:
            log.debug("monitor client lost", extra={"error": str(error) or type(error).__name__})
            writer.transport.abort()
        finally:
            self._clients -= 1
            writer.close()

    async def _reply(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> HttpReply:
        if self._clients > MAX_CLIENTS:
            with contextlib.suppress(OSError, TimeoutError):  # a client that still writes would not see the answer
                async with asyncio.timeout(_REFUSAL_S):
                    await reader.read(_MAX_HEAD_BYTES)
            return HttpReply(HTTPStatus.SERVICE_UNAVAILABLE, b"too many clients")
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                request = await _read(reader, writer)
        except _BodyTooLarge as error:
            return HttpReply(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, str(error).encode())
        except (ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            return HttpReply(HTTPStatus.BAD_REQUEST, str(error).encode())
        return await self._answer(request)


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(text)


class _BodyTooLarge(Exception):
    pass


def _head(reply: HttpReply) -> bytes:
    lines = [
        f"HTTP/1.1 {reply.status.value} {reply.status.phrase}",
        f"Content-Type: {reply.content_type}",
        f"Content-Length: {len(reply.body)}",
        *([f"Allow: {reply.allow}"] if reply.allow else []),
        "Connection: close",
    ]
    return "".join(f"{line}\r\n" for line in (*lines, "")).encode()


async def _read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> HttpRequest:
    """Raises ValueError naming what is wrong with the request, _BodyTooLarge."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise ValueError("no HTTP/1 request line")
    length, waits = 0, False
    for line in lines:
        name, _, value = line.partition(":")
        match name.strip().lower():
            case "content-length":
                # Longer numbers are not turned into integers: that takes time with the square of their length.
                length = int(value) if value.strip().isdecimal() and len(value) < 20 else -1
            case "transfer-encoding":
                raise ValueError("a body needs a Content-Length")
            case "expect":
                waits = value.strip().lower() == "100-continue"
    if length < 0:
        raise ValueError("Content-Length is not a number of bytes")
    if length > MAX_MONITOR_BODY_BYTES:
        raise _BodyTooLarge(f"a body may have {MAX_MONITOR_BODY_BYTES} bytes")
    if waits:
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    return HttpRequest(words[0], words[1], await reader.readexactly(length))
