"""Docker Engine of a newer Debian suite, unpacked into a directory of the cache; nothing is installed.

`python -m integration.docker.packages` does it, outside the enclosure, which has no network. The machine's own sources
of packages say where Debian is; only the suite's name differs. DOCKER_SUITE chooses it.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

from integration.framework.releases import PROJECT, one_build

CHOICE = "DOCKER_SUITE"
SUITE = "testing"
"""Debian's newest Engine that has met its users."""
CACHE = PROJECT / ".build" / "cache" / "docker"
_PACKAGES = ("docker.io", "docker-cli", "docker-compose", "tini-static")
_SOURCES = Path("/etc/apt")


class PackagesError(Exception):
    """The packages cannot be fetched."""


def chosen_suite() -> str:
    return os.environ.get(CHOICE) or SUITE


def programs() -> Path:
    """The root of the unpacked packages. Raises FileNotFoundError if they are not there."""
    found = CACHE / chosen_suite() / "root"
    if not found.exists():
        raise FileNotFoundError(f"find Docker Engine in {str(found)!r}: not unpacked (hint: make peers WHAT=docker)")
    return found


def unpack(suite: str) -> Path:
    """The packages of `suite` are unpacked, unless they were before. Raises PackagesError."""
    directory = CACHE / suite
    with one_build(directory):
        root = directory / "root"
        if root.exists():
            return root
        print(f"==> fetching Docker Engine of Debian {suite} (a minute, once)", flush=True)
        options = suite_options(suite, directory / "apt")
        files = directory / "packages"
        shutil.rmtree(files, ignore_errors=True)
        files.mkdir()
        _run("apt-get", *options, "update", "-q", directory=files)
        _run("apt-get", *options, "download", "-q", *_PACKAGES, directory=files)
        work = directory / ".root"
        shutil.rmtree(work, ignore_errors=True)
        for file in files.iterdir():
            _run("dpkg", "-x", str(file), str(work), directory=files)
        work.rename(root)
        return root


def _run(*argv: str, directory: Path) -> None:
    done = subprocess.run(argv, cwd=directory, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise PackagesError(f"run {argv[0]}: exit code {done.returncode}: {done.stderr.strip()[-2000:]}")


def suite_options(suite: str, directory: Path) -> tuple[str, ...]:
    """apt's options for the machine's sources with `suite` in place of its own; apt's files for it are in `directory`.

    Raises PackagesError when the machine has no source of its own suite.
    """
    (directory / "lists" / "partial").mkdir(parents=True, exist_ok=True)
    parts = directory / "parts"
    parts.mkdir(exist_ok=True)
    own = platform.freedesktop_os_release().get("VERSION_CODENAME", "")
    stanzas = []
    for path in sorted(_SOURCES.glob("sources.list.d/*.sources")):
        for stanza in path.read_text().split("\n\n"):
            changed, count = re.subn(rf"(?m)^Suites:.*\b{own}(?![\w-]).*$", f"Suites: {suite}", stanza)
            stanzas += [changed.strip()] * count
    lines = []
    for path in (_SOURCES / "sources.list", *sorted(_SOURCES.glob("sources.list.d/*.list"))):
        for line in path.read_text().splitlines() if path.exists() else ():
            changed, count = re.subn(rf"^(deb\s.*\s){own}(\s)", rf"\g<1>{suite}\g<2>", line)
            lines += [changed] * count
    if not stanzas and not lines:
        raise PackagesError(f"take packages of Debian {suite}: no source of {own or 'this machine'} in '{_SOURCES}'")
    (parts / "suite.sources").write_text("\n\n".join([*stanzas, ""]))
    (directory / "sources.list").write_text("\n".join([*lines, ""]))
    settings = {
        "Dir::Etc::SourceList": directory / "sources.list",
        "Dir::Etc::SourceParts": parts,
        "Dir::State::Lists": directory / "lists",
        "Dir::Cache::pkgcache": directory / "pkgcache.bin",
        "Dir::Cache::srcpkgcache": directory / "srcpkgcache.bin",
        "APT::Sandbox::User": "root",
    }
    return tuple(word for name, value in settings.items() for word in ("-o", f"{name}={value}"))


if __name__ == "__main__":
    try:
        unpack(chosen_suite())
    except (OSError, PackagesError) as error:
        sys.exit(f"docker: {error}")
