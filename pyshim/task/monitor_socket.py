"""The sandbox's monitor socket: Kata's HTTP paths that CSI drivers and `kata-runtime direct-volume` ask.

GET /direct-volume/stats?path=VOLUME gives the agent's answer as JSON, POST /direct-volume/resize takes
{"VolumePath", "Size"}. One request per connection; whoever connects is the shim's own user.
"""

import asyncio
import json
import logging
import os
import socket
from contextlib import suppress
from http import HTTPStatus
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

from pyshim.model.errors import InvalidArgument, NotFound, ShimError
from pyshim.model.volumes import VolumeStats
from pyshim.sandbox.seams import VolumeRpc

log = logging.getLogger("pyshim.task.monitor")

REQUEST_TIMEOUT_S = 10.0
_MAX_HEAD_BYTES = 64 * 1024
_MAX_BODY_BYTES = 64 * 1024


class _Request(NamedTuple):
    method: str
    target: str
    body: bytes


class _Reply(NamedTuple):
    status: HTTPStatus
    body: bytes


class MonitorSocket:
    """Serves `path` until `close`."""

    def __init__(self, path: str, volumes: VolumeRpc) -> None:
        self._path = path
        self._volumes = volumes
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """The socket takes connections of its owner. Raises OSError."""
        with suppress(FileNotFoundError):
            os.unlink(self._path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            # The mode of an unbound socket is its file's (unix(7)): there is no moment in which others could connect.
            os.fchmod(listener.fileno(), 0o600)
            listener.bind(self._path)
            self._server = await asyncio.start_unix_server(self._serve, sock=listener, limit=_MAX_HEAD_BYTES)
        except BaseException:
            listener.close()
            raise

    async def close(self) -> None:
        """No connection is taken any more. Idempotent; the file is whoever's who has it in the ledger."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            try:
                async with asyncio.timeout(REQUEST_TIMEOUT_S):
                    request = await _read(reader)
            except (ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
                reply = _Reply(HTTPStatus.BAD_REQUEST, str(error).encode())
            else:
                reply = await self._answer(request)
            head = f"HTTP/1.1 {reply.status.value} {reply.status.phrase}\r\nContent-Length: {len(reply.body)}\r\n"
            writer.write(f"{head}Connection: close\r\n\r\n".encode() + reply.body)
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                await writer.drain()
        except (OSError, TimeoutError) as error:
            log.debug("monitor client lost", extra={"error": str(error)})
        finally:
            writer.close()

    async def _answer(self, request: _Request) -> _Reply:
        url = urlsplit(request.target)
        try:
            match url.path:
                case "/direct-volume/stats":
                    if request.method != "GET":
                        return _Reply(HTTPStatus.METHOD_NOT_ALLOWED, b"want GET")
                    paths = parse_qs(url.query).get("path", [])
                    if len(paths) != 1:
                        raise InvalidArgument("read monitor request: parameter 'path' is missing")
                    return _Reply(HTTPStatus.OK, stats_json(await self._volumes.stats(paths[0])))
                case "/direct-volume/resize":
                    if request.method != "POST":
                        return _Reply(HTTPStatus.METHOD_NOT_ALLOWED, b"want POST")
                    await self._volumes.resize(*_resize_request(request.body))
                    return _Reply(HTTPStatus.OK, b"")
        except ShimError as error:
            log.info("monitor request failed", extra={"path": url.path, "error": str(error)})
            return _Reply(_status(error), str(error).encode())
        return _Reply(HTTPStatus.NOT_FOUND, b"no such path")


async def _read(reader: asyncio.StreamReader) -> _Request:
    """Raises ValueError naming what is wrong with the request."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise ValueError("no HTTP/1 request line")
    length = 0
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-length":
            length = int(value.strip()) if value.strip().isdecimal() else -1
        if name.strip().lower() == "transfer-encoding":
            raise ValueError("a body needs a Content-Length")
    if not 0 <= length <= _MAX_BODY_BYTES:
        raise ValueError(f"Content-Length is not between 0 and {_MAX_BODY_BYTES}")
    return _Request(words[0], words[1], await reader.readexactly(length))


def _resize_request(body: bytes) -> tuple[str, int]:
    try:
        raw = json.loads(body)
        path, size = raw["VolumePath"], raw["Size"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InvalidArgument(f"read monitor request: want VolumePath and Size: {error!r}") from error
    if not isinstance(path, str) or not isinstance(size, int) or isinstance(size, bool):
        raise InvalidArgument("read monitor request: VolumePath is not a text or Size not a number")
    return path, size


def stats_json(stats: VolumeStats) -> bytes:
    """The agent's VolumeStatsResponse as Go prints it: members of value zero are left out."""
    usages = [
        {"available": item.available, "total": item.total, "used": item.used, "unit": item.unit}
        for item in stats.usages
    ]
    condition = {"abnormal": stats.abnormal, "message": stats.message}
    raw = {
        "usage": [{key: value for key, value in usage.items() if value} for usage in usages],
        "volume_condition": {key: value for key, value in condition.items() if value},
    }
    return json.dumps(raw, separators=(",", ":")).encode()


def _status(error: ShimError) -> HTTPStatus:
    if isinstance(error, NotFound):
        return HTTPStatus.NOT_FOUND
    return HTTPStatus.BAD_REQUEST if isinstance(error, InvalidArgument) else HTTPStatus.INTERNAL_SERVER_ERROR
