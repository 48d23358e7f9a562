"""The wheels of requirements.lock, and pip's own, for tests that install without a network.

`python -m integration.framework.wheels` fetches them, checked against the locks' digests; later runs find them.
"""

from __future__ import annotations

import subprocess
import sys
from hashlib import sha256
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
LOCKS = (PROJECT / "requirements.lock", PROJECT / "requirements-image.lock")
DIRECTORY = PROJECT / ".build" / "cache" / "wheels"


def fetch() -> None:
    """`DIRECTORY` holds what the lock files name. Raises CalledProcessError."""
    mark = DIRECTORY / ".complete"
    wanted = sha256(b"".join(lock.read_bytes() for lock in LOCKS)).hexdigest()
    if mark.exists() and mark.read_text() == wanted:
        return
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    named = [word for lock in LOCKS for word in ("-r", str(lock))]
    subprocess.run([*pip, "--require-hashes", *named, "-d", DIRECTORY], check=True)
    mark.write_text(wanted)


if __name__ == "__main__":
    fetch()
