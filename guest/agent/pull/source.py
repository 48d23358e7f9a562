"""The source of an image: manifests and blobs by digest. All reads are limited and all digests checked.

Source: the OCI distribution and image specifications. No authentication and no TLS: the registry is on the node's own
network, or the guest's owner trusts it for another reason.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
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
        if isinstance(platform, dict) and (platform.get("os"), platform.get("architecture")) == ("linux", "amd64"):
            return _described(descriptor).digest
    raise PullError(f"{reference.name!r} has no image for linux on amd64")


def _described(descriptor: object) -> Layer:
    if isinstance(descriptor, dict):
        digest, media_type, size = (descriptor.get(key) for key in ("digest", "mediaType", "size"))
        if isinstance(digest, str) and _DIGEST.fullmatch(digest) and isinstance(size, int) and size >= 0:
            return Layer(digest, str(media_type), size)
    raise PullError("the manifest has a descriptor without digest or size")
