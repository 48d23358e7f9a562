"""An OCI image layout: a directory with index.json and blobs. Source: OCI image specification, image-layout.md."""

from __future__ import annotations

import json

from guest.agent.pull.source import Blob, PullError, Reference, bounded

_NAMES = ("io.containerd.image.name", "org.opencontainers.image.ref.name")


class ImageLayout:
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
