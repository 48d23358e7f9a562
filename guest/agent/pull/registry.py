"""A registry over plain HTTP/1.1, as far as pulling needs it. Small, because the interpreter's own client costs a guest
under emulation more time to import than an image to fetch.
"""

from __future__ import annotations

import socket

from guest.agent.pull.source import INDEXES, MANIFESTS, PullError, Reference, Source, bounded

TYPE_CHECKING = False
if TYPE_CHECKING:
    from guest.agent.pull.source import Blob

_TIMEOUT_S = 30.0
_MAX_REDIRECTS = 5
_MAX_LINE_BYTES = 16 << 10
_MAX_HEADERS = 100


class Registry(Source):
    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    def find(self, reference: Reference) -> tuple[str, bytes]:
        return self._manifest(reference, reference.version)

    def manifest(self, reference: Reference, digest: str) -> bytes:
        return self._manifest(reference, digest)[1]

    def _manifest(self, reference: Reference, version: str) -> tuple[str, bytes]:
        reply = get(f"{self._url}/v2/{reference.repository}/manifests/{version}", ", ".join(MANIFESTS + INDEXES))
        try:
            return reply.headers.get("content-type", "").partition(";")[0].strip(), bounded(reply.read)
        finally:
            reply.close()

    def blob(self, reference: Reference, digest: str) -> Blob:
        return get(f"{self._url}/v2/{reference.repository}/blobs/{digest}", "*/*")


class Reply:
    """An answer's headers and its body as a stream."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._file = connection.makefile("rb")
        self.status = 0
        self.headers: dict[str, str] = {}
        self._left = 0
        self._is_chunked = False
        self._is_endless = False

    def read_head(self) -> None:
        words = self._line().split(" ", 2)
        if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdigit():
            raise PullError(f"not an answer in HTTP: {words[0][:100]!r}")
        self.status = int(words[1])
        for _ in range(_MAX_HEADERS):
            line = self._line()
            if not line:
                break
            key, _, value = line.partition(":")
            self.headers[key.strip().lower()] = value.strip()
        else:
            raise PullError(f"an answer has more than {_MAX_HEADERS} headers")
        self._is_chunked = self.headers.get("transfer-encoding", "").lower() == "chunked"
        length = self.headers.get("content-length", "")
        self._is_endless = not self._is_chunked and not length
        if length and not length.isdigit():
            raise PullError(f"content-length {length[:100]!r} is no number")
        self._left = int(length or 0)

    def _line(self) -> str:
        line = self._file.readline(_MAX_LINE_BYTES)
        if not line.endswith(b"\n"):
            raise PullError("an answer ends within its head, or has a line too long")
        return line.decode("latin-1").rstrip("\r\n")

    def read(self, size: int) -> bytes:
        """At most `size` bytes of the body; empty at its end. PullError when it ends early."""
        if self._is_endless:
            return self._file.read1(size)
        if self._is_chunked and self._left == 0 and not self._next_chunk():
            return b""
        if self._left == 0:
            return b""
        data = self._file.read1(min(size, self._left))
        if not data:
            raise PullError(f"the connection ended {self._left} bytes early")
        self._left -= len(data)
        if self._is_chunked and self._left == 0:
            self._line()
        return data

    def _next_chunk(self) -> bool:
        text = self._line().partition(";")[0].strip()
        try:
            self._left = int(text, 16)
        except ValueError:
            raise PullError(f"{text[:100]!r} is no length of a chunk") from None
        return self._left > 0

    def close(self) -> None:
        self._file.close()
        self._connection.close()


def get(url: str, accept: str) -> Reply:
    """The answer to GET, redirects followed. Raises PullError naming url and status."""
    for _ in range(_MAX_REDIRECTS):
        reply = _ask(url, accept)
        if reply.status == 200:
            return reply
        reply.close()
        if reply.status not in (301, 302, 303, 307, 308):
            hint = " (it wants authentication, which this agent has not)" if reply.status == 401 else ""
            raise PullError(f"get {url!r}: status {reply.status}{hint}")
        location = reply.headers.get("location", "")
        if location.startswith("/"):
            location = "/".join(url.split("/")[:3]) + location
        if not location.startswith("http://"):
            raise PullError(f"get {url!r}: redirected to {location[:200]!r}, and this agent speaks plain HTTP only")
        url = location
    raise PullError(f"get {url!r}: redirected more than {_MAX_REDIRECTS} times")


def _ask(url: str, accept: str) -> Reply:
    where, _, path = url.removeprefix("http://").partition("/")
    host, colon, port = where.rpartition(":") if not where.endswith("]") else (where, "", "")
    name = (host if colon else where).strip("[]")
    if any(char.isspace() or char < " " for char in url) or (colon and not port.isdigit()):
        raise PullError(f"{url[:200]!r} is no address")
    try:
        connection = socket.create_connection((name, int(port) if colon else 80), _TIMEOUT_S)
    except OSError as error:
        raise PullError(f"connect {where!r}: {error.strerror or error}") from error
    request = f"GET /{path} HTTP/1.1\r\nHost: {where}\r\nAccept: {accept}\r\nConnection: close\r\n\r\n"
    reply = Reply(connection)
    try:
        connection.sendall(request.encode())
        reply.read_head()
    except BaseException:
        reply.close()
        raise
    return reply
