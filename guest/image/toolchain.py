"""The programs that build the images: packages of the guest's own suite, run with their own libraries.

The host's versions of mkfs.erofs or cpio would lay the images out in another way, and need not be there.
"""

from collections.abc import Iterable
from pathlib import Path

from guest.image.errors import BuildError

_LIBRARIES = ("lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu")
_PROGRAMS = ("bin", "usr/bin", "sbin", "usr/sbin")
_LOADER = "ld-linux-x86-64.so.2"


class Toolchain:
    """The programs in the unpacked packages `directories`, which are dependencies of each other only."""

    def __init__(self, directories: Iterable[Path]) -> None:
        self._directories = tuple(directories)

    def path(self, program: str) -> Path:
        """The file of `program`. Raises BuildError."""
        return self._find(_PROGRAMS, program)

    def argv(self, program: str) -> list[str]:
        """The words that run `program`, before its arguments."""
        libraries = [str(at / place) for at in self._directories for place in _LIBRARIES if (at / place).is_dir()]
        loader = self._find(_LIBRARIES, _LOADER)
        return [str(loader), "--library-path", ":".join(libraries), str(self.path(program))]

    def _find(self, places: tuple[str, ...], name: str) -> Path:
        for directory in self._directories:
            for place in places:
                if (file := directory / place / name).exists():
                    return file
        raise BuildError(f"find program {name}: no package of the recipe's BUILD_PACKAGES has it")
