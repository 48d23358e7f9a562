"""The manifest of an installation: what `install` wrote, with the digest of each content."""

from hashlib import sha256

import msgspec

from pyshim.model.errors import FailedPrecondition
from pyshim.node.install.disk import Disk, Found
from pyshim.node.install.writes import block_in

MANIFEST_VERSION = 1


class ManifestEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One file, link or block of ours."""

    path: str
    digests: tuple[str, ...]
    """The digests of its possible contents: one, or two during a change."""
    is_block: bool = False
    before: str | None = None
    """For a block in a file that `install` made: the text before the block. None: the file is not ours."""

    def state(self, found: Found) -> str:
        """ "ok", "edited" or "missing", for a file whose content is `found`."""
        part = our_part(found, is_block=self.is_block)
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
    try:
        manifest = msgspec.json.decode(found[0] if isinstance(found, tuple) else b"", type=Manifest)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise FailedPrecondition(f"read '{path}': {error}") from error
    if manifest.version != MANIFEST_VERSION:
        raise FailedPrecondition(f"read '{path}': version {manifest.version} is not known")
    return manifest


def states(manifest: Manifest, disk: Disk) -> list[tuple[str, str]]:
    """The path of each of our files, and "ok", "edited" or "missing"."""
    return [(entry.path, entry.state(disk.read(entry.path))) for entry in manifest.entries]


def our_part(found: Found, *, is_block: bool) -> str | None:
    """The part of the file that is ours: the block, or the whole text with the file's mode."""
    if found is None or isinstance(found, str):
        return found
    text = found[0].decode(errors="replace")
    if is_block:
        try:
            return block_in(text)
        except ValueError:
            return text  # its end marker is gone, so it is not as we wrote it
    return f"{found[1]:o}\n{text}"


def digest_of(part: str) -> str:
    return sha256(part.encode()).hexdigest()


def encoded(manifest: Manifest) -> Found:
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n", 0o644
