"""What lies where in the guest: the root file system, the initrd in front of it, and the root image file."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from guest.image import recipe
from guest.image.debian import run
from guest.image.elf import is_elf, needed_libraries
from guest.image.errors import BuildError
from guest.image.loader import AGENT_ARGV, SHELL_ARGV, init_program
from guest.image.modules import Module, ModuleStore, modules_alias, modules_dep
from guest.image.resume import Resumption
from guest.image.tree import Tree
from guest.image.unneeded import without_library

LIBRARY_DIRECTORY = "usr/lib/x86_64-linux-gnu"
_LIBRARY_PATHS = ("lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu", "lib64")
_DYNAMIC_LOADER = "ld-linux-x86-64.so.2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpacked:
    """Package contents on disk, by package name."""

    directories: dict[str, Path]

    def find(self, path: str) -> Path:
        """The one file at `path` in any package; links are followed inside the packages."""
        for directory in self.directories.values():
            file = directory / path
            if file.is_symlink():
                target = os.readlink(file)
                return self.find(os.path.normpath(os.path.join("/", os.path.dirname(path), target)).lstrip("/"))
            if file.is_file():
                return file
        raise BuildError(f"find {path}: in none of the packages")

    def library(self, name: str) -> Path:
        """The file of the shared library called `name` by those who need it."""
        for directory in _LIBRARY_PATHS:
            try:
                return self.find(f"{directory}/{name}")
            except BuildError:
                continue
        raise BuildError(f"find shared library {name}: in none of the packages")

    def command(self, path: str) -> list[str]:
        """The argv prefix that runs a program of the packages on this machine with the packages' own libraries."""
        paths = ":".join(str(d / p) for d in self.directories.values() for p in _LIBRARY_PATHS if (d / p).is_dir())
        return [
            str(self.find(f"lib/x86_64-linux-gnu/{_DYNAMIC_LOADER}")),
            "--library-path",
            paths,
            str(self.find(path)),
        ]


def _add_elf(tree: Tree, path: str, data: bytes, unpacked: Unpacked, permissions: int) -> None:
    """Add a program or library and, once each, every library it needs."""
    tree.add_file(path, data, permissions)
    for name in needed_libraries(data, path):
        directory = "usr/lib64" if name.startswith("ld-linux") else LIBRARY_DIRECTORY
        if f"{directory}/{name}" not in tree:
            _add_elf(tree, f"{directory}/{name}", unpacked.library(name).read_bytes(), unpacked, 0o755)


def _add_modules(tree: Tree, release: str, modules: Iterable[Module]) -> None:
    modules = list(modules)
    base = f"usr/lib/modules/{release}"
    for module in modules:
        tree.add_file(f"{base}/{module.path}", module.data)
    tree.add_file(f"{base}/modules.dep", modules_dep(modules).encode())
    tree.add_file(f"{base}/modules.alias", modules_alias(modules).encode())


def _add_python(tree: Tree, content: dict[str, bytes], unpacked: Unpacked) -> None:
    for path, data in content.items():
        if is_elf(data):
            _add_elf(tree, path, data, unpacked, 0o644)
        else:
            tree.add_file(path, data)
    tree.add_link("usr/bin/python3", "python3.11")


def root_tree(unpacked: Unpacked, python: dict[str, bytes], release: str, modules: Iterable[Module]) -> Tree:
    """The root file system."""
    tree = Tree()
    for link in ("bin", "lib", "lib64", "sbin"):
        tree.add_link(link, f"usr/{link}")
    for directory in recipe.EMPTY_DIRECTORIES:
        tree.add_directory(directory)
    for path, text in recipe.ETC_FILES.items():
        tree.add_file(path, text.encode())
    for path in recipe.PACKAGE_FILES:
        tree.add_file(path, unpacked.find(path).read_bytes())
    tree.add_link("etc/mtab", "../proc/self/mounts")
    for path in recipe.PROGRAMS:
        data = unpacked.find(path).read_bytes()
        for library in recipe.WITHOUT_LIBRARIES.get(path, ()):
            if library in needed_libraries(data, path):  # a later package may be built without
                data = without_library(data, library, path)
        _add_elf(tree, path, data, unpacked, 0o755)
    for name in recipe.EXTRA_LIBRARIES:
        if f"{LIBRARY_DIRECTORY}/{name}" not in tree:
            _add_elf(tree, f"{LIBRARY_DIRECTORY}/{name}", unpacked.library(name).read_bytes(), unpacked, 0o755)
    for kind in ("ext2", "ext3", "ext4"):
        tree.add_link(f"usr/sbin/mkfs.{kind}", "mke2fs")
    tree.add_file("usr/bin/busybox", unpacked.find("bin/busybox").read_bytes(), 0o755)
    for applet in recipe.BUSYBOX_APPLETS:
        tree.add_link(f"usr/bin/{applet}", "busybox")
    # the kernel's own path for loading on demand
    tree.add_link("usr/sbin/modprobe", "../bin/busybox")
    _add_python(tree, python, unpacked)
    _add_modules(tree, release, modules)
    return tree


def loader_tree(
    release: str,
    store: ModuleStore,
    names: Iterable[str] = recipe.LOADER_MODULES,
    *,
    argv: tuple[bytes, ...] = AGENT_ARGV,
    resumption: Resumption | None = None,
) -> Tree:
    """The initrd: two first processes, and the modules `names` that reach console and root image.

    /init starts `argv`, or goes on with `resumption`; /shell starts a shell.
    """
    modules = store.closure(names)
    loaded = {module.name for module in modules}
    background = [m for m in store.closure(recipe.BACKGROUND_MODULES) if m.name not in loaded]
    tree = Tree()
    tree.add_directory("dev")
    tree.add_character_device("dev/console", 5, 1)
    tree.add_directory("root")
    paths = []
    for module in modules:
        path = f"modules/{module.path.rpartition('/')[2]}"
        tree.add_file(path, module.data)
        paths.append(f"/{path}")
    behind = [f"/usr/lib/modules/{release}/{module.path}" for module in background]
    init = init_program(loader_modules=paths, background_modules=behind, argv=argv, resumption=resumption)
    tree.add_file("init", init, 0o755)
    shell = init_program(loader_modules=paths, background_modules=behind, argv=SHELL_ARGV)
    tree.add_file("shell", shell, 0o755)
    return tree


def erofs_image(tree: Tree, tool: list[str], target: Path, scratch: Path, *options: str) -> None:
    """Write `tree` as a root image without compression; nothing in it depends on the machine or the time."""
    directory = scratch / "root"
    directory.mkdir(mode=0o755)
    tree.write_to(directory, recipe.MTIME_S)
    run(
        [
            *tool,
            "--quiet",
            "-x-1",
            f"-T{recipe.MTIME_S}",
            f"-U{recipe.ROOT_IMAGE_UUID}",
            "--all-root",
            *options,
            target,
            directory,
        ]
    )
