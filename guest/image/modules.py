"""Kernel modules: the files of a list of names, and the index for the guest's modprobe."""

import shutil
from collections.abc import Iterable
from pathlib import Path

from guest.image.debian import run
from guest.image.errors import BuildError


def module_name(file_name: str) -> str:
    """The kernel's name of the module in `file_name`: dashes are underscores."""
    return file_name.rpartition("/")[2].removesuffix(".ko").replace("-", "_")


def parse_dependencies(text: str) -> dict[str, list[str]]:
    """Each module's name with the paths of its file and of all it needs, from depmod's output.

    Source of the format: modules.dep(5).
    """
    needed = {}
    for line in text.splitlines():
        path, colon, others = line.partition(":")
        if colon and path.endswith(".ko"):
            needed[module_name(path)] = [path, *others.split()]
    return needed


def module_base(package: Path) -> Path:
    """The directory above `lib/modules` in an unpacked kernel package: since Debian 13 it is /usr."""
    return package / "usr" if (package / "usr/lib/modules").is_dir() else package


class ModuleStore:
    """The modules of the kernel package unpacked in `package`; `busybox` makes their index."""

    def __init__(self, package: Path, release: str, *, busybox: Path) -> None:
        base = module_base(package)
        self._directory = base / "lib/modules" / release
        self._release, self.busybox = release, busybox
        self._needed = parse_dependencies(run([busybox, "depmod", "-n", "-b", base, release]))
        self._builtin = {module_name(line) for line in (self._directory / "modules.builtin").read_text().split()}

    def paths(self, names: Iterable[str]) -> list[str]:
        """The sorted files of the modules `names` and of their dependencies. Built-in modules have none."""
        found: set[str] = set()
        for name in names:
            if name not in self._builtin:
                if name not in self._needed:
                    raise BuildError(f"find kernel module {name}: not in {self._directory}")
                found.update(self._needed[name])
        return sorted(found)

    def loadable(self, names: Iterable[str]) -> list[str]:
        """Those of `names` that are not built into the kernel, in their order."""
        return [name for name in names if name not in self._builtin]

    def below(self, directories: Iterable[str]) -> list[str]:
        """The sorted names of all modules in `directories` of the kernel's sources and below."""
        starts = tuple(f"kernel/{directory}/" for directory in directories)
        return sorted(name for name, (path, *_) in self._needed.items() if path.startswith(starts))

    def install(self, root: Path, names: Iterable[str]) -> None:
        """The modules `names` and all they need are below `root`, with the index that BusyBox' modprobe reads."""
        target = root / "lib/modules" / self._release
        for path in self.paths(names):
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self._directory / path, target / path)
        run([self.busybox, "depmod", "-b", root, self._release])
