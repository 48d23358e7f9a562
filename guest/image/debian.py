"""Debian packages: their index, the order of their versions, what they depend on, and their content.

Nothing is installed on the host, and neither apt nor dpkg is needed: a package is an `ar` archive of two tar archives.
Sources: deb(5), deb-version(7).
"""

import itertools
import lzma
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from guest.image.errors import BuildError

_ALTERNATIVE = re.compile(r"([a-z0-9][a-z0-9+.-]*)")
_MODULE_TOPS = ("lib", "usr/lib")
_AR_MAGIC, _AR_HEADER_BYTES = b"!<arch>\n", 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """One binary package at one version, as the archive's index describes it."""

    name: str
    version: str
    architecture: str
    sha256: str
    size_bytes: int
    depends: tuple[tuple[str, ...], ...]
    archive: str
    """`main` or `security`: the mirrors that have it."""
    path: str
    """Its file, below the address of a mirror."""

    @property
    def file_name(self) -> str:
        """The name of the file in a cache: the epoch's colon is quoted, as apt does."""
        return f"{self.name}_{self.version}_{self.architecture}.deb".replace(":", "%3a")


def run(
    argv: Sequence[str | os.PathLike[str]],
    *,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    text: str | None = None,
) -> str:
    """The standard output of a command that reads `text`. Raises BuildError with the end of its stderr."""
    shown = os.fspath(argv[0])
    try:
        done = subprocess.run(argv, cwd=cwd, env=env, input=text, capture_output=True, text=True, check=False)
    except OSError as exc:
        raise BuildError(f"run {shown}: {exc.strerror}") from exc
    if done.returncode != 0:
        tail = " | ".join(done.stderr.strip().splitlines()[-5:])
        raise BuildError(f"run {shown}: exit status {done.returncode}: {tail or 'no error text'}")
    return done.stdout


def parse_packages(text: str, archive: str) -> Iterator[Package]:
    """The packages in `text`, an index of `archive`."""
    for stanza in text.strip().split("\n\n"):
        fields = dict(
            line.split(": ", 1) for line in stanza.splitlines() if not line.startswith((" ", "\t")) and ": " in line
        )
        if not fields:
            continue
        groups = [
            tuple(match[1] for choice in group.split("|") if (match := _ALTERNATIVE.match(choice.strip())))
            for key in ("Pre-Depends", "Depends")
            for group in fields.get(key, "").split(",")
            if group.strip()
        ]
        try:
            yield Package(
                name=fields["Package"],
                version=fields["Version"],
                architecture=fields["Architecture"],
                sha256=fields["SHA256"],
                size_bytes=int(fields["Size"]),
                depends=tuple(groups),
                archive=archive,
                path=fields["Filename"],
            )
        except (KeyError, ValueError) as exc:
            raise BuildError(f"read package index: {fields.get('Package', 'a package')} lacks a field: {exc}") from exc


def version_key(version: str) -> tuple[object, ...]:
    """Versions in Debian's order are in the order of their keys."""
    epoch, _, rest = version.rpartition(":")
    upstream, _, revision = rest.rpartition("-") if "-" in rest else (rest, "", "0")

    def character_key(character: str) -> int:
        # A tilde sorts before the end of the text, which is 0, and letters before all other characters.
        if character == "~":
            return -1
        return ord(character) + (0 if character.isalpha() else 256)

    def part_key(text: str) -> tuple[object, ...]:
        turns = re.findall(r"([^0-9]*)([0-9]*)", text)  # the last is the end of the text
        return tuple(((*map(character_key, letters), 0), int(digits or 0)) for letters, digits in turns)

    return int(epoch or 0), part_key(upstream), part_key(revision)


def newest_packages(packages: Iterable[Package]) -> dict[str, Package]:
    """The newest of each name; of equal versions the first."""
    found: dict[str, Package] = {}
    for package in packages:
        known = found.get(package.name)
        if known is None or (
            known.version != package.version and version_key(known.version) < version_key(package.version)
        ):
            found[package.name] = package
    return found


def dependency_closure(
    roots: Iterable[str], without: frozenset[str], index: Mapping[str, Package]
) -> tuple[Package, ...]:
    """`roots` and all their dependencies except those in `without`, sorted by name.

    The first of several alternatives counts, as for apt. Raises BuildError naming what the index lacks.
    """
    chosen: dict[str, Package] = {}
    wanted = set(roots)
    while wanted:
        if missing := sorted(wanted - index.keys()):
            raise BuildError(f"find package {missing[0]}: not in the archive's index")
        chosen.update((name, index[name]) for name in wanted)
        needed = {group[0] for name in wanted for group in index[name].depends if not without.intersection(group)}
        wanted = needed - chosen.keys()
    return tuple(chosen[name] for name in sorted(chosen))


def _seek_content(file: BinaryIO) -> None:
    """`file`, a package, stands at the content of its member `data.tar`. Raises ValueError."""
    if file.read(len(_AR_MAGIC)) != _AR_MAGIC:
        raise ValueError("not an ar archive")
    while header := file.read(_AR_HEADER_BYTES):
        name, size = header[:16].rstrip(b" /"), int(header[48:58])
        if name.startswith(b"data.tar"):
            return
        file.seek(size + size % 2, os.SEEK_CUR)
    raise ValueError("no data.tar in it")


def unpack(package: Package, file: Path, cache: Path) -> Path:
    """The directory holding the content of one package; unpacked once per digest, in one rename.

    Kernel modules are decompressed: the guest loads them sooner, and their signature is of the uncompressed file.
    """
    directory = cache / f"{package.name}_{package.sha256[:16]}"
    if directory.exists():
        return directory
    partial = cache / f".{directory.name}.{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        with file.open("rb") as stream:
            _seek_content(stream)
            with tarfile.open(fileobj=stream, mode="r|*") as content:
                # The package is of a signed archive: what it has is unpacked as it is, links with absolute targets too.
                content.extraction_filter = lambda member, path: member
                content.extractall(partial, numeric_owner=True)
        for module in itertools.chain.from_iterable(partial.glob(f"{top}/modules/**/*.ko.xz") for top in _MODULE_TOPS):
            module.with_suffix("").write_bytes(lzma.decompress(module.read_bytes()))
            module.unlink()
    except (OSError, ValueError, tarfile.TarError, lzma.LZMAError, EOFError) as exc:
        shutil.rmtree(partial, ignore_errors=True)
        raise BuildError(f"unpack '{file.name}': {exc}") from exc
    partial.rename(directory)
    return directory
