#!/usr/bin/env python3
"""The `install` of an archive: puts its pyshim on this node, without a network. `scripts/dist.py` copies it there.

It needs nothing but Python, of a version that the archive has packages for. It first reads the whole archive; then
`pyshim install` runs out of a virtual environment of the archive's packages, with the options given here. The only
option of this file is `--check`: read the archive, look at this node, and change nothing.

Python 3.7 has to be able to read this file, so that it is refused by name.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from typing import Any

SUMS = "SHA256SUMS"
_AGAIN = "(hint: unpack the archive again)"
_STAGE_BYTES = 120 << 20
"""Room for the virtual environment: 95 MiB with pip, and what pip needs meanwhile."""
_STAGES = "/var/lib"
"""Only root can write here. /tmp is open to every user, and often in memory."""


class Refused(Exception):
    """What stands in the way. Nothing was changed."""


def main(words: list[str]) -> int:
    here = os.path.dirname(os.path.abspath(__file__))
    try:
        release = read_release(here)
        require_node(release)
        require_whole(here)
        if words == ["--check"]:
            print(f"pyshim {release['version']}: the archive is whole, and this node can install it")
            return 0
        return install(here, words)
    except Refused as error:
        print(f"install: {error}", file=sys.stderr)
        return 1


def read_release(here: str) -> dict[str, Any]:
    path = f"{here}/release.json"
    try:
        with open(path, "rb") as file:
            release: dict[str, Any] = json.loads(file.read().decode())
        missing = {"version", "machine", "pythons", "glibc"} - set(release)
    except (OSError, ValueError, TypeError) as error:
        raise Refused(f"read '{path}': {error} {_AGAIN}") from error
    if missing:
        raise Refused(f"read '{path}': there is no {', '.join(sorted(missing))} {_AGAIN}")
    return release


def require_node(release: dict[str, Any]) -> None:
    """Python, processor and C library of this node are those that the archive has packages for. Raises Refused."""
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if python not in release["pythons"]:
        pythons = ", ".join(release["pythons"])
        hint = f"PYTHON {os.path.abspath(__file__)}, with one of those"
        raise Refused(f"{sys.executable} is Python {python}, the archive has packages for {pythons} (hint: {hint})")
    if platform.machine() != release["machine"]:
        raise Refused(f"this node is {platform.machine()}, the archive is for {release['machine']}")
    library, version = platform.libc_ver()
    if library != "glibc" or _numbers(version) < _numbers(release["glibc"]):
        found = f"{library} {version}".strip() or "not glibc"
        raise Refused(f"the C library is {found}, the archive needs glibc {release['glibc']} or later")
    try:
        import venv  # noqa: F401
    except ImportError as error:
        raise Refused(f"{sys.executable} has no module '{error.name}' (hint: install all of Python)") from error


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def require_whole(here: str) -> None:
    """The files are those of the archive, no more and no less, with its digests. Raises Refused."""
    path = f"{here}/{SUMS}"
    try:
        with open(path) as file:
            lines = [line.rstrip("\n").split("  ", 1) for line in file]
        wanted = {name: digest for digest, name in lines}
    except (OSError, ValueError) as error:
        raise Refused(f"read '{path}': {error} {_AGAIN}") from error
    found = {
        os.path.relpath(f"{directory}/{name}", here) for directory, _, names in os.walk(here) for name in names
    } - {SUMS}
    problems = [f"'{name}' is missing" for name in sorted(wanted.keys() - found)]
    problems += [f"'{name}' is not of the archive" for name in sorted(found - wanted.keys())]
    problems += [
        f"'{name}' was cut or altered"
        for name in sorted(found & wanted.keys())
        if _digest(f"{here}/{name}") != wanted[name]
    ]
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise Refused(f"read '{here}': {'; '.join(problems[:5])}{more} {_AGAIN}")


def _digest(path: str) -> str:
    if os.path.islink(path):
        return "a link"  # an archive has none
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for part in iter(lambda: file.read(1 << 20), b""):
            digest.update(part)
    return digest.hexdigest()


def install(here: str, words: list[str]) -> int:
    """The exit code of `pyshim install`. Raises Refused if it could not be started."""
    above = _STAGES if os.geteuid() == 0 else tempfile.gettempdir()
    try:
        free_bytes = shutil.disk_usage(above).free
        if free_bytes < _STAGE_BYTES:
            raise Refused(f"'{above}' has {free_bytes >> 20} MiB free, {_STAGE_BYTES >> 20} are needed")
        stage = tempfile.mkdtemp(prefix="pyshim-install-", dir=above)
    except OSError as error:
        raise Refused(f"make a directory in '{above}': {error}") from error
    os.umask(0o022)
    python = f"{stage}/bin/python"
    wheel, pip = _only(here, "pyshim-*.whl"), _only(here, "wheels/pip-*.whl")
    wheels, lock = f"{here}/wheels", f"{here}/requirements.lock"
    offline = ["--disable-pip-version-check", "install", "--quiet", "--no-index", "--no-deps"]
    try:
        _run(sys.executable, "-I", "-m", "venv", "--without-pip", stage)
        _run(python, "-I", f"{pip}/pip", *offline, pip)
        _run(python, "-I", "-m", "pip", *offline, "--require-hashes", "--find-links", wheels, "-r", lock)
        _run(python, "-I", "-m", "pip", *offline, wheel)
        parts = ["--wheel", wheel, "--wheels", wheels, "--lock", lock, "--guest", f"{here}/guest"]
        return _run_to_its_end([python, "-I", "-m", "pyshim", "install", *parts, *words])
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _only(here: str, pattern: str) -> str:
    found = glob.glob(f"{glob.escape(here)}/{pattern}")
    if len(found) != 1:
        raise Refused(f"read '{here}': there are {len(found)} files {pattern}, not one")
    return found[0]


def _run(*command: str) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if done.returncode != 0:
        said = done.stdout.decode(errors="replace").strip()[-1500:]
        raise Refused(f"run '{' '.join(command)}': exit code {done.returncode}: {said}")


def _run_to_its_end(command: list[str]) -> int:
    """Its exit code. SIGTERM is passed on and a terminal's SIGINT reaches both: it undoes its work, this one waits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = subprocess.Popen(command, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    signal.signal(signal.SIGTERM, lambda *_: child.send_signal(signal.SIGTERM))
    code = child.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
