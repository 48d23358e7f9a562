"""Block devices of the host, set up by a test; the shim makes none."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def loop_device(path: Path) -> Iterator[str]:
    """The path of a block device with the content of the file `path`."""
    made = subprocess.run(["losetup", "--find", "--show", path], check=True, capture_output=True, text=True)
    device = made.stdout.strip()
    try:
        yield device
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)
