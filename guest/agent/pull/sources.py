"""The source of an image: manifests and blobs by digest. All reads are limited and all digests checked.

Source: the OCI distribution and image specifications. No authentication and no TLS: the registry is on the node's own
network, or the guest's owner trusts it for another reason.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urljoin, urlsplit

MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine)
"""As an image's index has it."""
_MAX_DOCUMENT_BYTES = 4 << 20
_MAX_LAYERS = 128
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128}")
_PART = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_REPOSITORY = re.compile(rf"{_PART}(?:/{_PART})*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


class PullError(Exception):
    """The image cannot be pulled; the text says why."""


class Blob(Protocol):
    """A stream of a blob's bytes."""

    def read(self, size: int, /) -> bytes: ...
    def close(self) -> None: ...


class Reference:
    """An image's name taken apart: `docker.io/library/busybox:1.36` and the like."""

    __slots__ = ("name", "repository", "version")

    def __init__(self, name: str) -> None:
        """Raises PullError for text that cannot name an image."""
        rest, at, digest = name.partition("@")
        first, slash, remainder = rest.partition("/")
        is_registry = bool(slash) and ("." in first or ":" in first or first == "localhost")
        path = remainder if is_registry else rest
        repository, colon, tag = path.partition(":")
        self.name = name
        self.version = digest if at else tag if colon else "latest"
        if is_registry and first == "docker.io" and "/" not in repository:
            repository = f"library/{repository}"
        self.repository = repository
        is_version = _DIGEST.fullmatch(digest) if at else _TAG.fullmatch(self.version)
        if len(name) > 1024 or not _REPOSITORY.fullmatch(repository) or not is_version:
            raise PullError(f"{name[:200]!r} is no name of an image")


@dataclass(frozen=True, slots=True)
class Layer:
    digest: str
    media_type: str
    size: int


@dataclass(frozen=True, slots=True)
class Image:
    """A manifest's digest and its layers, the lowest first."""

    digest: str
    layers: list[Layer]


class ImageSource(Protocol):
    """A registry or a layout."""

    def find(self, reference: Reference) -> tuple[str, bytes]:
        """(media type, document) of what `reference` names."""

    def blob(self, reference: Reference, digest: str) -> Blob:
        """The blob of that digest, opened."""

    def manifest(self, reference: Reference, digest: str) -> bytes:
        """A manifest that an index lists."""


def image_of(source: ImageSource, name: str) -> Image:
    """The image called `name` for this machine. Raises PullError."""
    reference = Reference(name)
    media_type, document = source.find(reference)
    digest = digest_of(document)
    if _DIGEST.fullmatch(reference.version):
        check(document, reference.version)
        digest = reference.version
    members = _object(document, "manifest")
    if _is_index(media_type, members):
        digest = _for_this_machine(members, reference)
        document = source.manifest(reference, digest)
        check(document, digest)
        members = _object(document, "manifest")
    layers = members.get("layers")
    if not isinstance(layers, list) or not 0 < len(layers) <= _MAX_LAYERS:
        raise PullError(f"the manifest of {name!r} has no layers, or more than {_MAX_LAYERS}")
    return Image(digest, [_described(descriptor) for descriptor in layers])


def digest_of(document: bytes) -> str:
    return "sha256:" + hashlib.sha256(document).hexdigest()


def check(document: bytes, digest: str) -> None:
    algorithm, _, wanted = digest.partition(":")
    if hashlib.new(algorithm, document).hexdigest() != wanted:
        raise PullError(f"what was read is not {digest}")


def bounded(read: Callable[[int], bytes]) -> bytes:
    """All that `read` returns, up to the size of a document."""
    data = b""
    while chunk := read(65536):
        data += chunk
        if len(data) > _MAX_DOCUMENT_BYTES:
            raise PullError(f"a document is longer than {_MAX_DOCUMENT_BYTES} bytes")
    return data


def _object(document: bytes, what: str) -> dict[str, object]:
    try:
        members = json.loads(document)
    except (ValueError, RecursionError) as error:
        raise PullError(f"the {what} is not JSON") from error
    if not isinstance(members, dict):
        raise PullError(f"the {what} is no object")
    return members


def _is_index(media_type: str, members: dict[str, object]) -> bool:
    found = members.get("mediaType") or media_type
    return found in INDEXES or (found not in MANIFESTS and "manifests" in members)


def _for_this_machine(members: dict[str, object], reference: Reference) -> str:
    listed = members.get("manifests")
    for descriptor in listed if isinstance(listed, list) else []:
        platform = descriptor.get("platform") if isinstance(descriptor, dict) else None
        if isinstance(platform, dict) and (platform.get("os"), platform.get("architecture")) == ("linux", ARCHITECTURE):
            return _described(descriptor).digest
    raise PullError(f"{reference.name!r} has no image for linux on {ARCHITECTURE}")


def _described(descriptor: object) -> Layer:
    if isinstance(descriptor, dict):
        digest, media_type, size = (descriptor.get(key) for key in ("digest", "mediaType", "size"))
        if isinstance(digest, str) and _DIGEST.fullmatch(digest) and isinstance(size, int) and size >= 0:
            return Layer(digest, str(media_type), size)
    raise PullError("the manifest has a descriptor without digest or size")


# -- a registry --------------------------------------------------------------------------------------------------------

# Seconds of each wait for the registry: to connect, and for the next bytes.
_TIMEOUT_S = 30.0
_MAX_REDIRECTS = 5


class Registry:
    """A registry over plain HTTP/1.1."""

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


# -- a layout ----------------------------------------------------------------------------------------------------------

_NAMES = ("io.containerd.image.name", "org.opencontainers.image.ref.name")


class ImageLayout:
    """An OCI image layout: a directory with index.json and blobs. Source: OCI image specification, image-layout.md."""

    def __init__(self, path: str) -> None:
        self._path = path

    def find(self, reference: Reference) -> tuple[str, bytes]:
        try:
            index = json.loads(self._read("index.json"))
            listed = [entry for entry in index["manifests"] if isinstance(entry, dict)]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise PullError(f"'{self._path}/index.json' is no index of images") from error
        for entry in listed:
            if self._is_named(entry, reference):
                digest = str(entry.get("digest"))
                return str(entry.get("mediaType")), self.manifest(reference, digest)
        names = ", ".join(sorted(str((entry.get("annotations") or {}).get(_NAMES[0])) for entry in listed))[:500]
        raise PullError(f"'{self._path}' has no {reference.name!r}, but {names or 'nothing'}")

    def _is_named(self, entry: dict[str, object], reference: Reference) -> bool:
        """True for the full name or the digest. A tag alone counts only if the layout has no full names."""
        annotations = entry.get("annotations")
        names = annotations if isinstance(annotations, dict) else {}
        if entry.get("digest") == reference.version:
            return True
        full = names.get(_NAMES[0])
        if isinstance(full, str):
            known = Reference(full)
            return (known.repository, known.version) == (reference.repository, reference.version)
        return names.get(_NAMES[1]) in (reference.version, reference.name)

    def blob(self, reference: Reference, digest: str) -> Blob:
        algorithm, _, value = digest.partition(":")
        if not (algorithm.isalnum() and value.isalnum()):
            raise PullError(f"{digest[:200]!r} is no digest")
        return open(f"{self._path}/blobs/{algorithm}/{value}", "rb")

    def manifest(self, reference: Reference, digest: str) -> bytes:
        blob = self.blob(reference, digest)
        try:
            return bounded(blob.read)
        finally:
            blob.close()

    def _read(self, name: str) -> bytes:
        with open(f"{self._path}/{name}", "rb") as file:
            return bounded(file.read)
