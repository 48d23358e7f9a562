"""The package mirrors that the host's apt uses: their addresses, the proxy, and whether an expired index is accepted.

Sources of the formats: sources.list(5), apt.conf(5), apt-transport-mirror(1).
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from guest.image.debian import run
from guest.image.errors import BuildError

_ONE_LINE = re.compile(r"^deb\s+(?:\[[^]]*\]\s+)?(\S+)\s+(\S+)\s+(.+)$")
_SECURITY = "-security"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One repository of apt's: address without the last slash, suites."""

    url: str
    suites: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mirrors:
    """Where Debian's packages may be found."""

    main: tuple[str, ...]
    """Addresses to try for the suite and its updates, the preferred one first."""
    security: tuple[str, ...]
    """The same for its security updates."""
    proxies: dict[str, str] | None = None
    """Proxy by scheme; None: as the environment says."""
    takes_expired: bool = False
    """An index past its end of validity is accepted."""

    def of(self, archive: str) -> tuple[str, ...]:
        """The addresses to try for `archive`, which is `main` or `security`."""
        return self.main if archive == "main" else self.security


def _one_line_sources(text: str) -> Iterator[tuple[list[str], list[str], list[str]]]:
    for line in text.splitlines():
        if match := _ONE_LINE.match(line.split("#")[0].strip()):
            yield [match[1]], [match[2]], match[3].split()


def _stanza_sources(text: str) -> Iterator[tuple[list[str], list[str], list[str]]]:
    for stanza in re.split(r"\n\s*\n", text):
        fields: dict[str, str] = {}
        name = ""
        for line in stanza.splitlines():
            if line.startswith("#"):
                continue
            if line.startswith((" ", "\t")):
                fields[name] = f"{fields.get(name, '')} {line.strip()}"
            elif ":" in line:
                name, _, value = line.partition(":")
                name = name.lower()
                fields[name] = value.strip()
        if "deb" in fields.get("types", "").split() and fields.get("enabled", "yes").lower() not in ("no", "false"):
            yield fields.get("uris", "").split(), fields.get("suites", "").split(), fields.get("components", "").split()


def _addresses(uri: str) -> list[str]:
    """`uri`, or for a list of mirrors in a file what the file lists; none for what cannot be fetched by name."""
    if uri.startswith("mirror+file:"):
        try:
            lines = Path("/" + uri.removeprefix("mirror+file:").lstrip("/")).read_text().splitlines()
        except OSError:
            return []
        return [words[0] for line in lines if (words := line.split("#")[0].split())]
    return [uri] if uri.startswith(("http:", "https:", "file:")) else []


def apt_sources(etc: Path) -> list[Source]:
    """The binary repositories with a component `main` of the directory `etc`, as /etc/apt, in apt's order."""
    found = []
    parts = sorted(file for file in (etc / "sources.list.d").glob("*") if file.suffix in (".list", ".sources"))
    for file in (etc / "sources.list", *parts):
        if not file.is_file():
            continue
        text = file.read_text(errors="replace")
        parsed = _stanza_sources(text) if file.suffix == ".sources" else _one_line_sources(text)
        for uris, suites, components in parsed:
            addresses = [address.rstrip("/") for uri in uris for address in _addresses(uri)]
            if "main" in components:
                found += [Source(url=address, suites=tuple(suites)) for address in addresses]
    return found


def _security_beside(main: str) -> list[str]:
    """Where mirrors that have both keep the security updates: beside `debian`."""
    return [f"{main.removesuffix('/debian')}/debian-security"] if main.endswith("/debian") else []


def given_mirrors(main: str, security: str) -> Mirrors:
    """The mirror at the address `main`, with the security updates at `security` or beside it. Raises BuildError."""
    for url in (main, security):
        if url and not url.startswith(("http://", "https://", "file:/")):
            raise BuildError(f"take mirror '{url}': it starts with none of http://, https://, file:/")
    main = main.rstrip("/")
    return Mirrors(main=(main,), security=(security.rstrip("/"),) if security else tuple(_security_beside(main)))


def apt_mirrors(etc: Path = Path("/etc/apt")) -> Mirrors:
    """The mirrors of the host's apt, with its proxy. Raises BuildError where apt has none."""
    sources = apt_sources(etc)
    main = [source.url for source in sources if not all(_SECURITY in suite for suite in source.suites)]
    security = [source.url for source in sources if any(_SECURITY in suite for suite in source.suites)]
    security += [beside for url in main for beside in _security_beside(url)]
    if not main:
        raise BuildError(f"find a Debian mirror: apt has none in '{etc}' (hint: --mirror URL)")
    names = ("http", "Acquire::http::Proxy", "https", "Acquire::https::Proxy")
    answer = run(["apt-config", "shell", *names, "check", "Acquire::Check-Valid-Until/b"])
    settings = dict(word.split("=", 1) for word in shlex.split(answer))
    proxies = {name: settings[name] for name in ("http", "https") if settings.get(name, "DIRECT") != "DIRECT"}
    return Mirrors(
        main=tuple(dict.fromkeys(main)),
        security=tuple(dict.fromkeys(security)),
        proxies=proxies or None,
        takes_expired=settings.get("check") == "false",
    )
