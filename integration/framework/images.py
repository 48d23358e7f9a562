"""The payload: Debian's static busybox as a root file system and as an OCI archive, made here, byte for byte the
same every time.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from pyshim.model.architecture import go_architecture

BUSYBOX = Path("/bin/busybox")
ARCHITECTURE = go_architecture(os.uname().machine)
IMAGE = "local/busybox:test"
_EMPTY_DIRECTORIES = (
    "dev",
    "etc",
    "home",
    "proc",
    "root",
    "run",
    "sys",
    "tmp",
    "usr",
    "usr/bin",
    "usr/sbin",
    "sbin",
    "var",
)
_FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\nalice:x:1000:1000:Alice:/home:/bin/sh\n",
    "etc/group": "root:x:0:\nalice:x:1000:\nstaff:x:50:alice\n",
    "etc/os-release": 'NAME="busybox payload"\nID=busybox-payload\n',
}
_CONFIG: dict[str, Any] = {
    "architecture": ARCHITECTURE,
    "os": "linux",
    "config": {"Env": ["PATH=/bin:/sbin:/usr/bin:/usr/sbin"], "Cmd": ["/bin/sh"], "WorkingDir": "/"},
}
_OVERRIDDEN = "layer-marker"
_KINDS = "application/vnd.oci.image"
MANIFEST = f"{_KINDS}.manifest.v1+json"
Blobs: TypeAlias = dict[str, bytes]


BINDS_LOW_PORTS = bytes.fromhex("01000002" + "00040000" + 12 * "00")
"""The attribute `security.capability` of `cap_net_bind_service=ep`. Source: struct vfs_cap_data, linux/capability.h."""


def applets() -> list[str]:
    listed = subprocess.run([BUSYBOX, "--list"], check=True, capture_output=True, text=True).stdout.split()
    return sorted(name for name in listed if name != "busybox")


def _entry(name: str, kind: bytes, mode: int, size: int = 0, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.mode, info.size, info.linkname = kind, mode, size, link
    return info


def _add(tar: tarfile.TarFile, name: str, data: bytes, mode: int = 0o644) -> None:
    tar.addfile(_entry(name, tarfile.REGTYPE, mode, len(data)), io.BytesIO(data))


def base_layer(busybox: Path = BUSYBOX) -> bytes:
    """The payload's lower layer, a whole root file system by itself."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        tar.addfile(_entry("bin", tarfile.DIRTYPE, 0o755))
        for name in _EMPTY_DIRECTORIES:
            tar.addfile(_entry(name, tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755))
        _add(tar, "bin/busybox", busybox.read_bytes(), 0o755)
        for name in applets():
            tar.addfile(_entry(f"bin/{name}", tarfile.SYMTYPE, 0o777, link="busybox"))
        for name, text in _FILES.items():
            _add(tar, name, text.encode())
        _add(tar, _OVERRIDDEN, b"lower\n")
    return buffer.getvalue()


def upper_layer() -> bytes:
    """The payload's upper layer, so that an overlay has two lower directories: it changes one file."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        _add(tar, _OVERRIDDEN, b"upper\n")
    return buffer.getvalue()


def payload_layers() -> list[bytes]:
    """Those of the test image, the bottom one first."""
    return [base_layer(), upper_layer()]


def layer(files: Mapping[str, bytes], *, mode: int, owner: int = 0) -> bytes:
    """A layer of these files, or empty directories where the name ends with `/`; `owner` is user and group.

    Other directories are made with their files.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in files.items():
            kind = tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE
            info = _entry(name, kind, mode, len(data))
            info.uid = info.gid = owner
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def image_blobs(
    layers: Sequence[bytes] = (), settings: Mapping[str, object] | None = None, architecture: str = ARCHITECTURE
) -> tuple[str, Blobs]:
    """(digest of the manifest, blobs by digest) of an image with settings, of the payload's layers unless given."""
    settings = {
        **_CONFIG["config"],
        **({"Cmd": []} if settings and "Entrypoint" in settings else {}),
        **(settings or {}),
    }
    blobs: Blobs = {}

    def keep(data: bytes) -> dict[str, object]:
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        blobs[digest] = data
        return {"digest": digest, "size": len(data)}

    described = [{"mediaType": f"{_KINDS}.layer.v1.tar", **keep(layer)} for layer in layers or payload_layers()]
    diff_ids = [layer["digest"] for layer in described]
    config = {
        **_CONFIG,
        "architecture": architecture,
        "config": settings,
        "rootfs": {"type": "layers", "diff_ids": diff_ids},
    }
    config_blob = {"mediaType": f"{_KINDS}.config.v1+json", **keep(json.dumps(config, sort_keys=True).encode())}
    manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "config": config_blob, "layers": described}
    return str(keep(json.dumps(manifest, sort_keys=True).encode())["digest"]), blobs


def write_archive(
    path: Path,
    name: str = IMAGE,
    entrypoint: tuple[str, ...] = (),
    *,
    layers: Sequence[bytes] = (),
    settings: Mapping[str, object] | None = None,
    architecture: str = ARCHITECTURE,
) -> str:
    """An OCI image layout at `path`, of the payload's two layers unless `layers` are given.

    Returns the manifest's digest; equal busybox means equal digest.
    """
    digest, blobs = image_blobs(
        layers, {**(settings or {}), **({"Entrypoint": list(entrypoint)} if entrypoint else {})}, architecture
    )
    top = {"digest": digest, "size": len(blobs[digest])}
    names = {"io.containerd.image.name": name, "org.opencontainers.image.ref.name": name.rsplit(":", 1)[-1]}
    platform = {"architecture": architecture, "os": "linux"}
    listed = {"mediaType": MANIFEST, **top, "annotations": names, "platform": platform}
    with tarfile.open(path, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        _add(tar, "oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
        _add(tar, "index.json", json.dumps({"schemaVersion": 2, "manifests": [listed]}, sort_keys=True).encode())
        for digest, data in sorted(blobs.items()):
            _add(tar, f"blobs/{digest.replace(':', '/')}", data)
    return str(top["digest"])


def unpack_rootfs(directory: Path) -> Path:
    """The image's content as a plain directory, for `ctr run --rootfs` and direct calls."""
    directory.mkdir(parents=True)
    for layer in payload_layers():
        unpack(layer, directory)
    return directory


def unpack(layer: bytes, directory: Path) -> None:
    """The layer's files are in the directory, as its tar has them."""
    with tarfile.open(fileobj=io.BytesIO(layer)) as tar:
        tar.extractall(directory, filter="fully_trusted") if hasattr(tarfile, "data_filter") else tar.extractall(
            directory
        )
