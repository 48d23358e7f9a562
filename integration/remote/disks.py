"""The read-only disks a VM is given: its configuration, and an image layout that all VMs share."""

from __future__ import annotations

import json
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

from .certificates import Issued

CONFIG_SERIAL = "peerpod-config"
IMAGES_SERIAL = "peerpod-images"
IMAGES_IN_GUEST = "/run/peerpod/images"


def daemon_configuration(*, pod: str, namespace: str, server: Issued, client_authority: str) -> bytes:
    """`apf.json`, with the cloud API adaptor's names."""
    members = {
        "pod-network": {},
        "pod-namespace": namespace,
        "pod-name": pod,
        "tls-server-key": server.key,
        "tls-server-cert": server.certificate,
        "tls-client-ca": client_authority,
    }
    return json.dumps(members, indent=1).encode()


def write_config_disk(path: Path, files: Mapping[str, bytes]) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        for name, data in files.items():
            Path(scratch, name).write_bytes(data)
        _erofs(path, Path(scratch))


def write_images_disk(path: Path, archive: Path) -> None:
    """The OCI image layout in the tar file `archive` as a disk."""
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        with tarfile.open(archive) as tar:
            for member in tar:
                if not member.isreg() or member.name.startswith("/") or ".." in Path(member.name).parts:
                    continue
                target = Path(scratch, member.name)
                target.parent.mkdir(parents=True, exist_ok=True)
                source = tar.extractfile(member)
                assert source is not None
                target.write_bytes(source.read())
        _erofs(path, Path(scratch))


def _erofs(path: Path, directory: Path) -> None:
    made = path.with_suffix(".part")
    command = ["mkfs.erofs", "--quiet", "--all-root", str(made), str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"write disk '{path}': mkfs.erofs exited {done.returncode}: {done.stderr.strip()[-500:]}")
    made.chmod(0o600)
    made.rename(path)
