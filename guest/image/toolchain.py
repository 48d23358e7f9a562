"""The programs that build the images: packages of the guest's own suite, run with their own libraries.

The host's versions of mkfs.erofs or cpio would lay the images out in another way, and need not be there.
"""

from collections.abc import Iterable
from pathlib import Path

from guest.image.errors import BuildError
from guest.image.recipe import Architecture

_PROGRAMS = ("bin", "usr/bin", "sbin", "usr/sbin")


class Toolchain:
    """The programs in the unpacked packages `directories`, which are dependencies of each other only."""

    def __init__(self, directories: Iterable[Path], architecture: Architecture) -> None:
        self.directories = tuple(directories)
        self._libraries = (f"lib/{architecture.triplet}", f"usr/lib/{architecture.triplet}")
        self._loader = architecture.loader

    def path(self, program: str) -> Path:
        """The file of `program`. Raises BuildError."""
        return self._find(_PROGRAMS, program)

    def argv(self, program: str) -> list[str]:
        """The words that run `program`, before its arguments."""
        libraries = [str(at / place) for at in self.directories for place in self._libraries if (at / place).is_dir()]
        loader = self._find(self._libraries, self._loader)
        return [str(loader), "--library-path", ":".join(libraries), str(self.path(program))]

    def _find(self, places: tuple[str, ...], name: str) -> Path:
        for directory in self.directories:
            for place in places:
                if (file := directory / place / name).exists():
                    return file
        raise BuildError(f"find program {name}: no package of the recipe's BUILD_PACKAGES has it")
