"""Kata's asset hashes: a pod names the SHA-512 of its kernel, image or hypervisor, and no other file is used.

A guest's image is hundreds of megabytes and every pod is a new process, so digests are kept under /run by the file's
identity: device, inode, size, times of change. A changed file has another identity.
"""

import hashlib
import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from pyshim.config.effective import Effective
from pyshim.config.keys import Table
from pyshim.host.files import replace_file
from pyshim.model.errors import FailedPrecondition, InvalidArgument

log = logging.getLogger(__name__)

HASHED_ASSETS: Mapping[str, str] = {
    "kernel_hash": "kernel",
    "image_hash": "image",
    "initrd_hash": "initrd",
    "firmware_hash": "firmware",
    "firmware_volume_hash": "firmware_volume",
    "hypervisor_hash": "path",
    "path_hash": "path",
    "jailer_hash": "jailer_path",
}
"""Annotation under io.katacontainers.config.hypervisor. to the key of the file it is about, in both spellings."""
CACHE_DIR = "/run/pyshim/asset-hashes"
_PREFIX = "io.katacontainers.config.hypervisor."
HASH_TYPES = ("io.katacontainers.asset_hash_type", f"{_PREFIX}asset_hash_type")
"""The type of the digests, under the names of Kata's Go and Rust runtimes."""
_DIGEST = re.compile("[0-9a-fA-F]{128}")
_CHUNK_BYTES = 1 << 20
_MAX_ENTRIES = 64
_SETTLED_NS = 2_000_000_000
"""A file changed less than this ago may change again within one tick of its clock, so its digest is not kept."""


def verify_assets(effective: Effective, annotations: Mapping[str, str], cache_dir: str = CACHE_DIR) -> None:
    """Every file a hash annotation names is the one with that hash; raises InvalidArgument naming both otherwise."""
    wanted = {name: annotations[_PREFIX + name] for name in HASHED_ASSETS if _PREFIX + name in annotations}
    for name in HASH_TYPES:
        kind = annotations.get(name, "sha512")
        if kind != "sha512":
            raise InvalidArgument(f"read annotation '{name}': {kind[:100]!r} is not \"sha512\", the only type")
    for name, expected in wanted.items():
        annotation, key = _PREFIX + name, HASHED_ASSETS[name]
        if not _DIGEST.fullmatch(expected):
            raise InvalidArgument(f"read annotation '{annotation}': not a SHA-512 in 128 hexadecimal digits")
        path = effective.of(Table.HYPERVISOR, key).value
        if not path:
            raise InvalidArgument(f"verify annotation '{annotation}': {key} in '{effective.source.path}' names no file")
        actual = sha512_of(path, cache_dir)
        if actual != expected.lower():
            demanded = f"{expected[:16]}... as annotation '{annotation}' demands"
            raise InvalidArgument(f"verify {key} '{path}': its sha512 is {actual[:16]}..., not {demanded}")


def sha512_of(path: str, cache_dir: str, clock_ns: Callable[[], int] = time.time_ns) -> str:
    """The file's SHA-512 in hexadecimal digits, from the cache when the file is the one that was read before."""
    try:
        with open(path, "rb") as file:
            identity = _identity(file.fileno())
            known = _cached(cache_dir, identity)
            if known:
                return known
            digest = hashlib.sha512()
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
            if _identity(file.fileno()) != identity:
                raise FailedPrecondition(f"verify '{path}': it changes while it is read")
            status = os.fstat(file.fileno())
    except OSError as exc:
        raise FailedPrecondition(f"verify '{path}': {exc.strerror}") from exc
    if clock_ns() - max(status.st_mtime_ns, status.st_ctime_ns) > _SETTLED_NS:
        _keep(cache_dir, identity, digest.hexdigest())
    return digest.hexdigest()


def _identity(fd: int) -> str:
    status = os.fstat(fd)
    return f"{status.st_dev}-{status.st_ino}-{status.st_size}-{status.st_mtime_ns}-{status.st_ctime_ns}"


def _cached(directory: str, identity: str) -> str:
    """The digest stored for `identity`; empty where it is absent, or where others than us could have written it."""
    try:
        status = os.lstat(directory)
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            return ""
        with open(os.path.join(directory, identity), encoding="ascii") as file:
            text = file.read(129)
    except (OSError, ValueError):
        return ""
    return text if _DIGEST.fullmatch(text) else ""


def _keep(directory: str, identity: str, digest: str) -> None:
    file = os.path.join(directory, identity)
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        replace_file(file, digest.encode("ascii"), mode=0o600, durable=False, many_writers=True)
        for name in _oldest(directory):
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(directory, name))
    except OSError as exc:
        log.warning("asset hash not kept", extra={"directory": directory, "error": str(exc)})


def _oldest(directory: str) -> list[str]:
    entries = sorted(os.scandir(directory), key=lambda entry: entry.stat().st_mtime_ns)
    return [entry.name for entry in entries[: max(0, len(entries) - _MAX_ENTRIES)]]
