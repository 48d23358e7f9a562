"""Kata's asset hashes: a pod gives the SHA-512 of its kernel, image or hypervisor, and starts with no other file.

Digests are stored on disk (`host/file_answers.py`): images have hundreds of megabytes, and each pod is a new process.
"""

import hashlib
import os
import re
from collections.abc import Mapping

from pyshim.config.effective import Effective
from pyshim.config.keys import Table
from pyshim.host.file_answers import FileAnswers, file_identity
from pyshim.host.os_errors import os_errors
from pyshim.model.config import HYPERVISOR_PREFIX
from pyshim.model.errors import FailedPrecondition, InvalidArgument

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
"""The key of the file, by the annotation's name without HYPERVISOR_PREFIX. `path` has two annotations."""
CACHE_DIR = "/run/pyshim/asset-hashes"
HASH_TYPES = ("io.katacontainers.asset_hash_type", f"{HYPERVISOR_PREFIX}asset_hash_type")
"""The annotations of Kata's Go and Rust runtimes for the type of the hashes."""
_DIGEST = re.compile("[0-9a-fA-F]{128}")
_CHUNK_BYTES = 1 << 20


def verify_assets(effective: Effective, annotations: Mapping[str, str], cache_dir: str = CACHE_DIR) -> None:
    """Every file with a hash annotation has that hash. Raises InvalidArgument naming file and annotation if not."""
    wanted = {
        name: annotations[HYPERVISOR_PREFIX + name] for name in HASHED_ASSETS if HYPERVISOR_PREFIX + name in annotations
    }
    for name in HASH_TYPES:
        kind = annotations.get(name, "sha512")
        if kind != "sha512":
            raise InvalidArgument(f"read annotation '{name}': {kind[:100]!r} is not \"sha512\", the only type")
    answers = FileAnswers(cache_dir)
    for name, expected in wanted.items():
        annotation, key = HYPERVISOR_PREFIX + name, HASHED_ASSETS[name]
        if not _DIGEST.fullmatch(expected):
            raise InvalidArgument(f"read annotation '{annotation}': not a SHA-512 in 128 hexadecimal digits")
        path = effective.of(Table.HYPERVISOR, key).value
        if not path:
            raise InvalidArgument(f"verify annotation '{annotation}': {key} in '{effective.source.path}' names no file")
        actual = sha512_of(path, answers)
        if actual != expected.lower():
            demanded = f"{expected[:16]}... as annotation '{annotation}' demands"
            raise InvalidArgument(f"verify {key} '{path}': its sha512 is {actual[:16]}..., not {demanded}")


def sha512_of(path: str, answers: FileAnswers) -> str:
    """The file's SHA-512 in hexadecimal digits; from `answers` if the same file was read before."""
    with os_errors(f"verify '{path}'"), open(path, "rb") as file:
        before = os.fstat(file.fileno())
        if _DIGEST.fullmatch(known := answers.stored(before)):
            return known
        digest = hashlib.sha512()
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
        after = os.fstat(file.fileno())
    if file_identity(before) != file_identity(after):
        raise FailedPrecondition(f"verify '{path}': it changed while it was read")
    answers.store(after, digest.hexdigest())
    return digest.hexdigest()
