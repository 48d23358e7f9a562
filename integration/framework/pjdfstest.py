"""pjdfstest, a suite of POSIX's rules for file systems, as its authors publish it on crates.io.

`python -m integration.framework.pjdfstest` builds it, outside the enclosure, which has no network. Its tests run where
INSIDE is set, which `make peers WHAT=inside` does.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

CHOICE = "INSIDE"
VERSION = "0.2.2"
_ROOT = Path(__file__).resolve().parents[2] / ".build" / "cache" / "pjdfstest" / VERSION
PROGRAM = _ROOT / "bin" / "pjdfstest"
FIGURES = Path(__file__).resolve().parents[2] / ".build" / "pjdfstest"
"""The directory of what its runs found."""
USERS = (("nobody", "nogroup"), ("tests", "tests"))
"""That the suite becomes: each user, with a group."""
ADD_USERS = "".join(
    f"echo {user}:x:{number}:{number}::/:/bin/sh >> /etc/passwd; echo {group}:x:{number}: >> /etc/group; "
    for number, (user, group) in enumerate(USERS, 2000)
)
SETTINGS = f"""\
[features]
posix_fallocate = {{}}
rename_ctime = {{}}
utime_now = {{}}
utimensat = {{}}
stat_st_birthtime = {{}}
[settings]
naptime = 0.01
allow_remount = false
[dummy_auth]
entries = [{", ".join(f'["{user}", "{group}"]' for user, group in USERS)}]
"""
_RESULT = re.compile(r"^(\S+::\S+|\S+)\s+(ok|FAILED|skipped)$")


def is_chosen() -> bool:
    return bool(os.environ.get(CHOICE))


def build() -> None:
    """The program is at PROGRAM. Raises OSError or CalledProcessError."""
    if PROGRAM.exists():
        return
    cargo = shutil.which("cargo")
    if cargo is None:
        raise FileNotFoundError("build pjdfstest: no program 'cargo' (hint: Debian's package cargo, or rustup)")
    print(f"pjdfstest {VERSION}: building, which takes some minutes", flush=True)
    subprocess.run([cargo, "install", "--quiet", "--root", _ROOT, "--version", VERSION, "pjdfstest"], check=True)


def results(output: str) -> dict[str, str]:
    """By test: ok, FAILED or skipped."""
    return {found[1]: found[2] for line in output.splitlines() if (found := _RESULT.match(line))}


if __name__ == "__main__":
    try:
        build()
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"pjdfstest: {error}")
