"""A Debian archive of one suite: its indexes, verified by Debian's keyring, and its packages, verified by the indexes.

Nothing comes from the host's apt but the address of its mirror. The verified indexes stay in the cache, so what a later
build takes is the same until `update` is called.

Source of the formats: Debian's wiki page DebianRepository/Format.
"""

import functools
import hashlib
import json
import lzma
import os
import re
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import BinaryIO

from guest.image import recipe
from guest.image.debian import Package, dependency_closure, newest_packages, parse_packages
from guest.image.errors import BuildError
from guest.image.mirrors import Mirrors

Progress = Callable[[str], None]

_TIMEOUT_S = 60.0
"""Of one wait for the mirror, not of a whole file."""
_CONNECTIONS = 4
_RELEASE_LIMIT_BYTES = 4 << 20
_UNPACKED_LIMIT_BYTES = 512 << 20
_INDEXES = "indexes.json"


_ARMOUR = [b"-----BEGIN PGP SIGNED MESSAGE-----", b"-----BEGIN PGP SIGNATURE-----", b"-----END PGP SIGNATURE-----"]
"""The lines between which a signed text and its signature are. Source: RFC 9580, section 7."""


class NotThere(BuildError):
    """The mirror has no such file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """What the signed Release file of one suite says of the index that we read."""

    index_sha256: str
    index_size_bytes: int
    valid_until: str
    """As the file has it; empty: it does not expire."""


def snapshot_mirrors(date: str) -> Mirrors:
    """Debian as its snapshot service had it at `date`, as in 20260101T000000Z. Raises BuildError."""
    if not re.fullmatch(r"[0-9]{8}T[0-9]{6}Z", date):
        raise BuildError(f"take snapshot {date!r}: it is not a time as in 20260101T000000Z")
    main, security = (recipe.SNAPSHOTS.format(archive=name, date=date) for name in ("debian", "debian-security"))
    return Mirrors(main=(main,), security=(security,), takes_expired=True)


def find_keyring(given: Path | None, places: Iterable[str] = recipe.KEYRINGS) -> Path:
    """The file with Debian's keys: `given`, or the first of `places` that is there. Raises BuildError."""
    candidates = [Path(place) for place in places] if given is None else [given]
    for path in candidates:
        if path.is_file():
            return path.resolve()
    hint = "install debian-archive-keyring, or --keyring FILE" if given is None else "it is Debian's keyring, one file"
    raise BuildError(f"find keyring '{candidates[0]}': ENOENT (no such file) (hint: {hint})")


def verified_text(message: bytes, keyring: Path) -> str:
    """What is signed in `message`, an InRelease file, by a key of the keyring. Raises BuildError with the reason."""
    program = next((name for name in ("gpgv", "sqv") if shutil.which(name)), None)
    if program is None:
        raise BuildError("this machine has neither gpgv nor sqv")
    lines = [line.rstrip() for line in message.splitlines()]
    if [line for line in lines if line.startswith(b"-----")] != _ARMOUR or [lines[0], lines[-1]] != _ARMOUR[::2]:
        # Of two texts in one file, the program would give both, and a good signature of either.
        raise BuildError("it is not one signed text")
    options = ["--status-fd", "1"] if program == "gpgv" else ["--cleartext"]
    with tempfile.TemporaryDirectory(prefix="guest-release-") as directory:
        signed, text = Path(directory, "InRelease"), Path(directory, "Release")
        signed.write_bytes(message)
        argv: list[str | Path] = [program, *options, "--keyring", keyring, "--output", text, signed]
        done = subprocess.run(argv, capture_output=True, text=True, errors="replace", check=False)
        # gpgv's exit status is of all signatures: one by a key newer than the keyring would fail it.
        is_good = "[GNUPG:] GOODSIG " in done.stdout if program == "gpgv" else done.returncode == 0
        if is_good and text.exists():
            return text.read_text(errors="replace")
    said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    raise BuildError(f"{program} found no good signature by keyring '{keyring}': {said[-1].strip()[:200]}")


def parse_release(text: str, suite: str, index: str) -> Release:
    """What `text`, a Release file, says of `index` of `suite`. Raises BuildError for the file of another suite."""
    fields: dict[str, str] = {}
    digests: dict[str, tuple[str, int]] = {}
    section = ""
    for line in text.splitlines():
        if line.startswith(" "):
            words = line.split()
            if section == "SHA256" and len(words) == 3 and words[1].isdigit():
                digests[words[2]] = words[0], int(words[1])
        else:
            section, _, value = line.partition(":")
            fields[section] = value.strip()
    if suite != fields.get("Codename"):
        raise BuildError(f"it is of {fields.get('Codename', 'no suite')!r}, not of {suite!r}")
    if index not in digests:
        raise BuildError(f"it lists no {index}")
    sha256, size_bytes = digests[index]
    return Release(index_sha256=sha256, index_size_bytes=size_bytes, valid_until=fields.get("Valid-Until", ""))


def _has_expired(release: Release, now_s: float) -> bool:
    return bool(release.valid_until) and parsedate_to_datetime(release.valid_until).timestamp() < now_s


class Archive:
    """The packages of one suite with its updates and security updates.

    `mirrors` is asked when something must be fetched, so that a build out of the cache needs none.
    """

    def __init__(
        self,
        *,
        suite: str,
        architecture: str,
        mirrors: Callable[[], Mirrors],
        keyring: Path | None,
        cache: Path,
        progress: Progress,
    ) -> None:
        self._suite, self._keyring = suite, keyring
        self._index = f"main/binary-{architecture}/Packages.xz"
        self._cache, self._progress = cache, progress
        self._ask_for_mirrors = mirrors

    @functools.cached_property
    def _mirrors(self) -> Mirrors:
        return self._ask_for_mirrors()

    @functools.cached_property
    def _opener(self) -> urllib.request.OpenerDirector:
        proxies = self._mirrors.proxies
        return urllib.request.build_opener(*([] if proxies is None else [urllib.request.ProxyHandler(proxies)]))

    def update(self) -> None:
        """The newest indexes of the mirror are in the cache. On BuildError the cache has what it had."""
        keyring = find_keyring(self._keyring)
        self._cache.mkdir(parents=True, exist_ok=True)
        indexes = [
            {"archive": archive, "sha256": self._update_index(suite, archive, keyring)}
            for suite, archive in (
                (self._suite, "main"),
                (f"{self._suite}-updates", "main"),
                (f"{self._suite}-security", "security"),
            )
        ]
        partial = self._cache / f".{_INDEXES}.{os.getpid()}"
        partial.write_text(json.dumps(indexes))
        partial.replace(self._cache / _INDEXES)
        kept = {index["sha256"] for index in indexes}
        for file in self._cache.glob("*.xz"):
            if file.stem not in kept:
                file.unlink()

    def _update_index(self, suite: str, archive: str, keyring: Path) -> str:
        """The digest of the newest index of `suite`, which is in the cache."""
        refusals = []
        for url in self._mirrors.of(archive):
            self._progress(f"fetch the index of {suite} from {url}")
            try:
                release = self._release(url, suite, keyring)
            except NotThere as exc:
                refusals.append(str(exc))
                continue
            index = f"{url}/dists/{suite}/{self._index}"
            by_digest = f"{index.rpartition('/')[0]}/by-hash/SHA256/{release.index_sha256}"
            target = self._cache / f"{release.index_sha256}.xz"
            try:
                self._fetch_file(by_digest, target, sha256=release.index_sha256, size_bytes=release.index_size_bytes)
            except NotThere:  # a mirror without files by their digest
                self._fetch_file(index, target, sha256=release.index_sha256, size_bytes=release.index_size_bytes)
            return release.index_sha256
        option = "--mirror" if archive == "main" else "--security-mirror"
        raise BuildError(f"find suite '{suite}': {'; '.join(refusals) or 'no mirror is known'} (hint: {option} URL)")

    def _release(self, url: str, suite: str, keyring: Path) -> Release:
        place = f"{url}/dists/{suite}/InRelease"
        message = self._fetch(place, _RELEASE_LIMIT_BYTES)
        try:
            release = parse_release(verified_text(message, keyring), suite, self._index)
        except BuildError as exc:
            raise BuildError(f"verify '{place}': {exc}") from exc
        if not self._mirrors.takes_expired and _has_expired(release, time.time()):
            raise BuildError(f"take '{place}': it was valid until {release.valid_until} (hint: --mirror URL)")
        return release

    def resolve(self, wanted: tuple[str, ...], without: frozenset[str]) -> tuple[Package, ...]:
        """The packages `wanted` with their dependencies, but for those in `without`, at their newest versions.

        Of the cached indexes, which are fetched if there are none. Reading them takes most of the time of a build with
        nothing to do, so the result is cached, too.
        """
        roots, others = sorted(wanted), sorted(without)
        name = hashlib.sha256(" ".join(roots).encode()).hexdigest()[:8]
        remembered = self._cache / f"resolution-{name}.json"
        try:
            asked, answer = json.loads(remembered.read_text())
            if asked == [(self._cache / _INDEXES).read_text(), roots, others]:
                return tuple(
                    Package(**{**fields, "depends": tuple(map(tuple, fields["depends"]))}) for fields in answer
                )
        except (OSError, ValueError, TypeError, KeyError):
            pass  # absent, or written by another version of this file
        try:
            indexes = self._cached_indexes()
        except (OSError, ValueError, KeyError, TypeError, lzma.LZMAError):
            self.update()
            indexes = self._cached_indexes()
        newest = newest_packages(package for archive, text in indexes for package in parse_packages(text, archive))
        packages = dependency_closure(roots, without, newest)
        question = [(self._cache / _INDEXES).read_text(), roots, others]
        remembered.write_text(json.dumps([question, [asdict(package) for package in packages]]))
        return packages

    def _cached_indexes(self) -> list[tuple[str, str]]:
        """Each archive with the text of its index."""
        found = []
        for index in json.loads((self._cache / _INDEXES).read_text()):
            content = (self._cache / f"{index['sha256']}.xz").read_bytes()
            if hashlib.sha256(content).hexdigest() != index["sha256"]:
                raise ValueError("damaged index")
            text = lzma.LZMADecompressor().decompress(content, max_length=_UNPACKED_LIMIT_BYTES)
            found.append((index["archive"], text.decode()))
        return found

    def download(self, packages: Iterable[Package], directory: Path) -> dict[str, Path]:
        """The files of `packages` in `directory`, by name. Those that it lacks or has damaged are fetched."""
        directory.mkdir(parents=True, exist_ok=True)
        files = {package.name: directory / package.file_name for package in packages}
        missing = [p for p in packages if not files[p.name].exists() or _digest(files[p.name]) != p.sha256]
        if missing:
            total_mib = sum(package.size_bytes for package in missing) >> 20
            self._progress(f"download {len(missing)} Debian packages, {total_mib} MiB")
            _ = self._opener  # made here, once, not by the threads
            with ThreadPoolExecutor(_CONNECTIONS) as pool:
                for _ in pool.map(self._fetch_package, missing, [files[package.name] for package in missing]):
                    pass
        return files

    def _fetch_package(self, package: Package, target: Path) -> None:
        refusal = NotThere(f"fetch '{package.path}': no mirror is known")
        for url in self._mirrors.of(package.archive):
            try:
                place = f"{url}/{package.path}"
                return self._fetch_file(place, target, sha256=package.sha256, size_bytes=package.size_bytes)
            except NotThere as exc:
                refusal = exc
        raise refusal

    # -- transfer ------------------------------------------------------------------------------------------------------

    def _open(self, url: str) -> BinaryIO:
        try:
            response: BinaryIO = self._opener.open(url, timeout=_TIMEOUT_S)
        except urllib.error.HTTPError as exc:
            exc.close()
            kind = NotThere if exc.code in (403, 404, 410) else BuildError
            raise kind(f"fetch '{url}': HTTP status {exc.code}") from exc
        except (OSError, ValueError) as exc:
            reason = getattr(exc, "reason", exc)
            said = getattr(reason, "strerror", None) or reason
            kind = NotThere if isinstance(reason, FileNotFoundError) else BuildError
            raise kind(f"fetch '{url}': {said} (hint: is there a network, and is it the right mirror?)") from exc
        return response

    def _fetch(self, url: str, limit_bytes: int) -> bytes:
        with self._open(url) as response:
            try:
                content = response.read(limit_bytes + 1)
            except OSError as exc:
                raise BuildError(f"fetch '{url}': {exc}") from exc
        if len(content) > limit_bytes:
            raise BuildError(f"fetch '{url}': longer than {limit_bytes} bytes")
        return content

    def _fetch_file(self, url: str, target: Path, *, sha256: str, size_bytes: int) -> None:
        """The file at `url` is `target`, if it has the size and digest that a signed index gives it."""
        content = self._fetch(url, size_bytes)
        if (found := hashlib.sha256(content).hexdigest()) != sha256:
            raise BuildError(f"fetch '{url}': its SHA-256 is {found}, not {sha256} as in the signed index")
        partial = target.with_name(f".{target.name}.{os.getpid()}")
        partial.write_bytes(content)
        partial.replace(target)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
