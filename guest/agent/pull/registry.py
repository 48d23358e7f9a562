"""A registry over plain HTTP/1.1, for pulling."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urljoin, urlsplit

from guest.agent.pull.source import INDEXES, MANIFESTS, Blob, PullError, Reference, bounded

# Seconds of each wait for the registry: to connect, and for the next bytes.
_TIMEOUT_S = 30.0
_MAX_REDIRECTS = 5


class Registry:
    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    def find(self, reference: Reference) -> tuple[str, bytes]:
        return self._manifest(reference, reference.version)

    def manifest(self, reference: Reference, digest: str) -> bytes:
        return self._manifest(reference, digest)[1]

    def _manifest(self, reference: Reference, version: str) -> tuple[str, bytes]:
        reply = get(f"{self._url}/v2/{reference.repository}/manifests/{version}", ", ".join(MANIFESTS + INDEXES))
        try:
            return reply.header("content-type").partition(";")[0].strip(), bounded(reply.read)
        finally:
            reply.close()

    def blob(self, reference: Reference, digest: str) -> Blob:
        return get(f"{self._url}/v2/{reference.repository}/blobs/{digest}", "*/*")


class Reply:
    """An answer's status and headers, and its body as a stream. Owns `connection`, on which a request was sent."""

    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self._connection = connection
        with _as_pull_errors():
            self._response = connection.getresponse()
        self.status = self._response.status
        length = self.header("content-length")
        if length and not length.isdigit():
            raise PullError(f"content-length {length[:100]!r} is no number")
        if self._response.headers.defects:
            raise PullError("an answer ends within its head, or has a line too long, or one that is no header")

    def header(self, name: str) -> str:
        return str(self._response.headers.get(name, ""))

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes of the body; empty at its end. PullError when it ends early."""
        with _as_pull_errors():
            data = self._response.read1(size)
        if not data and self._response.length:
            raise PullError(f"the connection ended {self._response.length} bytes early")
        return data

    def close(self) -> None:
        self._response.close()
        self._connection.close()


@contextmanager
def _as_pull_errors() -> Iterator[None]:
    try:
        yield
    except http.client.RemoteDisconnected as error:
        raise PullError("an answer ends within its head") from error
    except http.client.BadStatusLine as error:
        raise PullError(f"not an answer in HTTP: {str(error).strip()[:100]!r}") from error
    except http.client.IncompleteRead as error:
        raise PullError("the connection ended early, or what was sent is no length of a chunk") from error
    except http.client.HTTPException as error:
        raise PullError(f"an answer cannot be read: {error}") from error


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
        location = reply.header("location")
        if location.startswith("/"):
            location = urljoin(url, location)
        if not location.startswith("http://"):
            raise PullError(f"get {url!r}: redirected to {location[:200]!r}, and this agent speaks plain HTTP only")
        url = location
    raise PullError(f"get {url!r}: redirected more than {_MAX_REDIRECTS} times")


def _ask(url: str, accept: str) -> Reply:
    try:
        if any(char.isspace() or char < " " for char in url):
            raise ValueError(url)
        parts = urlsplit(url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=_TIMEOUT_S)
    except ValueError:
        raise PullError(f"{url[:200]!r} is no address") from None
    try:
        connection.connect()
    except OSError as error:
        raise PullError(f"connect {parts.netloc!r}: {error.strerror or error}") from error
    try:
        path = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
        connection.request("GET", path, headers={"Accept": accept, "Connection": "close"})
        return Reply(connection)
    except BaseException:
        connection.close()
        raise
