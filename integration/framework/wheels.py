"""The wheels of requirements.lock, for a test that installs without a network.

`python -m integration.framework.wheels` fetches them, checked against the lock's digests; later runs find them.
"""

from __future__ import annotations

import subprocess
import sys
from hashlib import sha256
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
LOCK = PROJECT / "requirements.lock"
DIRECTORY = PROJECT / ".build" / "cache" / "wheels"


def fetch() -> None:
    """`DIRECTORY` holds what the lock file names. Raises CalledProcessError."""
    mark = DIRECTORY / ".complete"
    wanted = sha256(LOCK.read_bytes()).hexdigest()
    if mark.exists() and mark.read_text() == wanted:
        return
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--require-hashes", "-r", LOCK, "-d", DIRECTORY], check=True)
    mark.write_text(wanted)


if __name__ == "__main__":
    fetch()
