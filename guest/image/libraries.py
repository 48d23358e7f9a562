"""The agent's Python libraries for another processor than this machine's: wheels, of the digests in the lock file."""

import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from guest.image.debian import run
from guest.image.errors import BuildError
from guest.image.recipe import Architecture

_PACKAGE = "protobuf"
_LOCK = "requirements.lock"


def foreign_libraries(checkout: Path, architecture: Architecture, cache: Path, progress: Callable[[str], None]) -> Path:
    """The directory with the libraries, as in `site-packages`; downloaded once for each state of the lock file.

    Raises BuildError.
    """
    found = re.search(rf"^{_PACKAGE}==(?:.*\\\n)+.*\n", (checkout / _LOCK).read_text(), re.MULTILINE)
    if found is None:
        raise BuildError(f"find {_PACKAGE} in {_LOCK}: it is not locked")
    locked = found[0]
    directory = cache / "wheels" / f"{_PACKAGE}-{sha256(locked.encode()).hexdigest()[:16]}-{architecture.name}"
    if directory.exists():
        return directory
    progress(f"download {locked.split()[0]} for {architecture.name}")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
        wanted, files = Path(scratch, "wanted.txt"), Path(scratch, "files")
        wanted.write_text(locked)
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps")
        where = ("--only-binary", ":all:", "--platform", f"manylinux2014_{architecture.machine}")
        run([*pip, "--require-hashes", *where, "-r", wanted, "-d", files])
        for wheel in files.iterdir():
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(Path(scratch, "made"))
        shutil.move(Path(scratch, "made"), directory)
    return directory
