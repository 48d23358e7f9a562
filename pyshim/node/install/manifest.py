"""The manifest of an installation: what `install` wrote, with the digest of each content."""

from collections.abc import Collection
from hashlib import sha256

import msgspec
from msgspec.structs import replace

from pyshim.model.decoding import damaged, from_json
from pyshim.model.errors import FailedPrecondition
from pyshim.node.install.daemon_json import members_in
from pyshim.node.install.disk import Disk, Found
from pyshim.node.install.writes import block_in

MANIFEST_VERSION = 2
"""Manifests of version 1 have no digest."""
_ANEW = "move this file away; 'pyshim install' then names the files that stand in its place"


class ManifestEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One file, link or block of ours, or our members of a file."""

    path: str
    digests: tuple[str, ...]
    """The digests of its possible contents: one, or two during a change."""
    is_block: bool = False
    before: str | None = None
    """For a part of a file that `install` made: the text before it. None: the file is not ours."""
    members: tuple[str, ...] = ()
    """The names of our members, if our part is members."""

    @property
    def is_part(self) -> bool:
        """In a file that may have other text."""
        return self.is_block or bool(self.members)

    def state(self, found: Found) -> str:
        """ "ok", "edited" or "missing", for a file whose content is `found`."""
        part = our_part(found, is_block=self.is_block, members=self.members)
        return "missing" if part is None else "ok" if digest_of(part) in self.digests else "edited"


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The files and directories that `install` wrote; by default none."""

    version: int = MANIFEST_VERSION
    release: str = ""
    is_complete: bool = True
    """False while an installation is under way."""
    entries: tuple[ManifestEntry, ...] = ()
    directories: tuple[str, ...] = ()
    """The directories that `install` made, the outer before the inner."""
    sha256: str = ""
    """Of this manifest with an empty one in its place; empty in manifests of releases before 0.2."""

    def by_path(self) -> dict[str, ManifestEntry]:
        return {entry.path: entry for entry in self.entries}


def manifest_path(prefix: str) -> str:
    return f"{prefix}/manifest.json"


def read_manifest(disk: Disk, prefix: str) -> Manifest | None:
    """None if nothing is installed. Raises FailedPrecondition for a malformed file."""
    path = manifest_path(prefix)
    found = disk.read(path)
    if found is None:
        return None
    content = found[0] if isinstance(found, tuple) else b""
    manifest = from_json(content, Manifest, damaged(path, FailedPrecondition, _ANEW))
    if manifest.version == MANIFEST_VERSION and manifest.sha256 != _seal(manifest):
        raise damaged(path, FailedPrecondition, _ANEW)("its digest is wrong")
    if manifest.version not in (1, MANIFEST_VERSION):
        raise FailedPrecondition(f"read '{path}': version {manifest.version} is not known")
    return manifest


def states(manifest: Manifest, disk: Disk) -> list[tuple[str, str]]:
    """The path of each of our files, and "ok", "edited" or "missing"."""
    return [(entry.path, entry.state(disk.read(entry.path))) for entry in manifest.entries]


def our_part(found: Found, *, is_block: bool, members: Collection[str] = ()) -> str | None:
    """The part of the file that is ours: the block, the members, or the whole text with the file's mode."""
    if found is None or isinstance(found, str):
        return found
    text = found[0].decode(errors="replace")
    if is_block or members:
        try:
            return block_in(text) if is_block else members_in(text, members)
        except ValueError:
            return text  # its end marker is gone, or it is no JSON: it is not as we wrote it
    return f"{found[1]:o}\n{text}"


def digest_of(part: str) -> str:
    return sha256(part.encode()).hexdigest()


def encoded(manifest: Manifest) -> Found:
    current = replace(manifest, version=MANIFEST_VERSION)
    sealed = replace(current, sha256=_seal(current))
    return msgspec.json.format(msgspec.json.encode(sealed), indent=1) + b"\n", 0o644


def _seal(manifest: Manifest) -> str:
    return sha256(msgspec.json.encode(replace(manifest, sha256=""))).hexdigest()
