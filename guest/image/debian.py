"""Finds, downloads and unpacks Debian packages. Nothing is installed on the host.

apt verifies downloads against the archive's signed indexes; files in our cache are checked again by digest.
"""

import hashlib
import os
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from guest.image.errors import BuildError

Progress = Callable[[str], None]
_LOCK_TRIES, _LOCK_PAUSE_S = 60, 2.0
"""`apt-get update` does not wait for the lock of the indexes. In two minutes another one has fetched them."""
_AUTHENTICATED = (
    *("-o", "APT::Get::AllowUnauthenticated=false", "-o", "Acquire::AllowInsecureRepositories=false"),
    *("-o", "Acquire::AllowWeakRepositories=false", "-o", "Acquire::AllowDowngradeToInsecureRepositories=false"),
)
"""Unsigned packages are refused, whatever the machine's apt is configured to."""
_TRUSTED = re.compile(r"^[^#\n]*\btrusted\s*[=:]\s*(?:yes|true|on|1|with)\b", re.IGNORECASE | re.MULTILINE)
"""The option with which apt accepts an unsigned source. Source: sources.list(5)."""
_ARCHIVES = (("debian", "{suite}"), ("debian", "{suite}-updates"), ("debian-security", "{suite}-security"))
_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
_ALTERNATIVE = re.compile(r"([a-z0-9][a-z0-9+.-]*)")


Archive = tuple[str, ...]
"""Where packages come from: options of apt that name other sources than the machine's."""
MACHINE: Archive = ()


def snapshot_archive(date: str, directory: Path, *, suite: str) -> Archive:
    """Debian as snapshot.debian.org had it at `date`, as in 20260101T000000Z; apt's files for it are in `directory`.

    Signatures of the archive are checked, but not their end of validity. Raises BuildError.
    """
    if not re.fullmatch(r"[0-9]{8}T[0-9]{6}Z", date):
        raise BuildError(f"take snapshot {date!r}: it is not a time as in 20260101T000000Z")
    (directory / "lists/partial").mkdir(parents=True, exist_ok=True)
    sources = directory / "sources.list"
    lines = [
        f"deb [signed-by={_KEYRING} check-valid-until=no] http://snapshot.debian.org/archive/{archive}/{date}"
        f" {place.format(suite=suite)} main\n"
        for archive, place in _ARCHIVES
    ]
    if not sources.exists() or sources.read_text() != "".join(lines):
        sources.write_text("".join(lines))
    settings = {
        "Dir::Etc::SourceList": sources,
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::State::Lists": directory / "lists",
        "Dir::Cache::pkgcache": directory / "pkgcache.bin",
        "Dir::Cache::srcpkgcache": directory / "srcpkgcache.bin",
        "APT::Sandbox::User": "root",
    }
    return tuple(word for name, value in settings.items() for word in ("-o", f"{name}={value}"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """One binary package at one version, as the archive's index describes it."""

    name: str
    version: str
    architecture: str
    sha256: str
    depends: tuple[tuple[str, ...], ...]

    @property
    def file_name(self) -> str:
        """The name `apt-get download` gives the file: the epoch's colon is quoted."""
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


def parse_packages(text: str) -> dict[str, Package]:
    """Packages by name from stanzas in the archive's index format; the first stanza of a name counts."""
    found: dict[str, Package] = {}
    for stanza in text.strip().split("\n\n"):
        fields = dict(
            line.split(": ", 1) for line in stanza.splitlines() if not line.startswith((" ", "\t")) and ": " in line
        )
        if "Package" not in fields or fields["Package"] in found:
            continue
        groups = [
            tuple(match[1] for choice in group.split("|") if (match := _ALTERNATIVE.match(choice.strip())))
            for key in ("Pre-Depends", "Depends")
            for group in fields.get(key, "").split(",")
            if group.strip()
        ]
        if "SHA256" not in fields:
            raise BuildError(f"read package index: {fields['Package']} has no SHA256: run apt-get update")
        found[fields["Package"]] = Package(
            name=fields["Package"],
            version=fields["Version"],
            architecture=fields["Architecture"],
            sha256=fields["SHA256"],
            depends=tuple(groups),
        )
    return found


def dependency_closure(
    roots: Iterable[str], without: frozenset[str], lookup: Callable[[list[str]], dict[str, Package]]
) -> tuple[Package, ...]:
    """`roots` and all their dependencies except those in `without`, sorted by name.

    The first of several alternatives counts, as for apt. `lookup` is called once per level of depth.
    """
    chosen: dict[str, Package] = {}
    wanted = sorted(set(roots))
    while wanted:
        found = lookup(wanted)
        if missing := [name for name in wanted if name not in found]:
            raise BuildError(f"find package {missing[0]}: not in the apt indexes: run apt-get update")
        chosen.update((name, found[name]) for name in wanted)
        needed = {group[0] for name in wanted for group in found[name].depends if not without.intersection(group)}
        wanted = sorted(needed - chosen.keys())
    return tuple(chosen[name] for name in sorted(chosen))


def index_lookup(archive: Archive = MACHINE) -> Callable[[list[str]], dict[str, Package]]:
    """Finds the candidate version of each name in apt's indexes."""

    def lookup(names: list[str]) -> dict[str, Package]:
        words = ["apt-cache", *archive, "show", "--no-all-versions", "--", *names]
        output = subprocess.run(words, capture_output=True, text=True, check=False).stdout
        return parse_packages(output) if output.strip() else {}

    return lookup


def refuse_unauthenticated(archive: Archive = MACHINE) -> None:
    """apt accepts every source of packages only signed. Raises BuildError naming the file of another one."""
    places = ("list", "Dir::Etc::SourceList/f", "parts", "Dir::Etc::SourceParts/d")
    answer = dict(word.split("=", 1) for word in shlex.split(run(["apt-config", *archive, "shell", *places])))
    parts = [path for path in sorted(Path(answer["parts"]).glob("*")) if path.suffix in (".list", ".sources")]
    for path in (Path(answer["list"]), *parts):
        if path.is_file() and (found := _TRUSTED.search(path.read_text(errors="replace"))):
            raise BuildError(f"take packages of '{path}': {found[0].strip()[:100]!r} switches signatures off")


def update_indexes(
    progress: Progress, pause: Callable[[float], None] = time.sleep, *, archive: Archive = MACHINE
) -> None:
    """apt's indexes are fetched anew. While another apt has their lock, this one is tried again."""
    progress("fetch Debian package indexes")
    for tries_left in reversed(range(_LOCK_TRIES)):
        try:
            run(["apt-get", *_AUTHENTICATED, *archive, "update", "-q"])
        except BuildError as exc:
            if not tries_left or "Could not get lock" not in str(exc):
                raise
            pause(_LOCK_PAUSE_S)
        else:
            return


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def download(
    packages: Iterable[Package], cache: Path, progress: Progress, *, archive: Archive = MACHINE
) -> dict[str, Path]:
    """The package files by package name. One apt call downloads those that the cache lacks or has damaged."""
    cache.mkdir(parents=True, exist_ok=True)
    files = {package.name: cache / package.file_name for package in packages}
    digests = {package.name: package.sha256 for package in packages}
    missing = [p for p in packages if not files[p.name].exists() or _digest(files[p.name]) != p.sha256]
    if missing:
        progress(f"download {len(missing)} Debian packages")
        for package in missing:
            files[package.name].unlink(missing_ok=True)
        # apt's own sandbox user cannot write into a cache below a private checkout
        run(
            [
                *("apt-get", *_AUTHENTICATED, *archive, "download", "-q", "-o", "APT::Sandbox::User=root"),
                *(f"{p.name}={p.version}" for p in missing),
            ],
            cwd=cache,
        )
    for name, path in files.items():
        if not path.exists():
            raise BuildError(f"download {name}: apt-get wrote no {path.name}")
        if _digest(path) != digests[name]:
            raise BuildError(f"download {name}: {path.name} has not the digest of the index")
    return files


def unpack(package: Package, file: Path, cache: Path) -> Path:
    """The directory holding the content of one package; unpacked once per digest, in one rename."""
    directory = cache / f"{package.name}_{package.sha256[:16]}"
    if not directory.exists():
        partial = cache / f".{directory.name}.{os.getpid()}"
        partial.mkdir(parents=True)
        run(["dpkg-deb", "-x", file, partial])
        partial.rename(directory)
    return directory
