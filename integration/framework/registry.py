"""An OCI registry for the tests' one image: what a guest that pulls needs of one, over plain HTTP."""

from __future__ import annotations

import contextlib
import http.server
import io
import json
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


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

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            made.asked.append(self.path)
            prefix, _, version = self.path.rpartition("/")
            data = None
            if prefix == f"/v2/{repository}/manifests":
                data = blobs.get(version if ":" in version else manifest)
            elif prefix == f"/v2/{repository}/blobs":
                data = blobs.get(version)
            if data is None:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Type", "application/vnd.oci.image.manifest.v1+json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer((address, 0), Handler)
    made = Registry(url=f"http://{address}:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
