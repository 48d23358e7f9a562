"""An OCI registry for the tests' one image: what a guest that pulls needs of one, over plain HTTP."""

from __future__ import annotations

import contextlib
import http.server
import io
import json
import tarfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .images import MANIFEST


@dataclass(slots=True, kw_only=True)
class Registry:
    url: str
    asked: list[str] = field(default_factory=list)
    """Every path that was asked for."""


def blobs_of(archive: Path) -> tuple[str, dict[str, bytes]]:
    """(digest of the manifest, blobs by digest) of an OCI image archive."""
    with tarfile.open(archive) as tar:
        files = {member.name: (tar.extractfile(member) or io.BytesIO()).read() for member in tar if member.isreg()}
    manifest = json.loads(files["index.json"])["manifests"][0]["digest"]
    blobs = {f"sha256:{name.rpartition('/')[2]}": data for name, data in files.items() if name.startswith("blobs/")}
    return manifest, blobs


@contextlib.contextmanager
def registry(address: str, archive: Path, repository: str) -> Iterator[Registry]:
    """Serves the image of `archive` as `repository` under every tag, on a free port of `address`."""
    manifest, blobs = blobs_of(archive)
    found = {repository: manifest}
    with serve(address, blobs, lambda name, version: version if ":" in version else found.get(name)) as made:
        yield made


@contextlib.contextmanager
def serve(
    address: str, blobs: Mapping[str, bytes], digest: Callable[[str, str], str | None], port: int = 0
) -> Iterator[Registry]:
    """Serves `blobs`; `digest` says which is the manifest of a repository's tag or digest."""

    class Handler(http.server.BaseHTTPRequestHandler):
        default_request_version = "HTTP/1.1"
        """Of an answer to what is no request: a client that tries TLS recognises HTTP by it."""

        def do_GET(self) -> None:
            self.wfile.write(self._head())

        def do_HEAD(self) -> None:
            self._head()

        def _head(self) -> bytes:
            """The headers are sent; what follows them."""
            made.asked.append(self.path)
            prefix, _, version = self.path.partition("?")[0].removeprefix("/v2/").rpartition("/")
            repository, _, kind = prefix.rpartition("/")
            found = digest(repository, version) if kind == "manifests" else version
            # Clients ask for the version of the API first.
            data = b"{}" if self.path == "/v2/" else blobs.get(found or "")
            if data is None:
                self.send_error(404)
                return b""
            self.send_response(200)
            self.send_header("Content-Type", MANIFEST)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Docker-Content-Digest", str(found))
            self.end_headers()
            return data

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer((address, port), Handler)
    made = Registry(url=f"http://{address}:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
