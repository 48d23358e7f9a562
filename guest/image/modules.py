"""Kernel modules: which files a list of names needs, and the index files `modprobe` reads in the guest."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from guest.image.elf import module_info
from guest.image.errors import BuildError


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """One loadable module: `path` is relative to /lib/modules/RELEASE."""

    name: str
    path: str
    data: bytes
    depends: tuple[str, ...]
    aliases: tuple[str, ...]


def module_name(file_name: str) -> str:
    """The name the kernel gives the module in `file_name`: dashes are underscores."""
    return file_name.rpartition("/")[2].removesuffix(".ko").replace("-", "_")


def without_signature(data: bytes) -> bytes:
    """`data` without the appended signature: the kernel does not insist on one, and checking it costs boot time.

    Source of the layout: kernel scripts/sign-file.c: content, PKCS#7, 12 bytes of descriptor ending in the length,
    magic text.
    """
    magic = b"~Module signature appended~\n"
    if not data.endswith(magic):
        return data
    end = len(data) - len(magic)
    signature_bytes = int.from_bytes(data[end - 4 : end], "big")
    return data[: end - 12 - signature_bytes]


class ModuleStore:
    """The modules of one unpacked kernel package."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files = {module_name(file.name): file for file in directory.rglob("*.ko")}
        self._builtin = {module_name(line) for line in (directory / "modules.builtin").read_text().split()}

    def load(self, name: str) -> Module:
        """The module called `name`."""
        file = self._files.get(name)
        if file is None:
            raise BuildError(f"find kernel module {name}: not in {self._directory}")
        data = file.read_bytes()
        info = module_info(data, file.name)
        depends = tuple(module_name(dep) for value in info.get("depends", []) for dep in value.split(",") if dep)
        return Module(
            name=name,
            path=file.relative_to(self._directory).as_posix(),
            data=without_signature(data),
            depends=depends,
            aliases=tuple(info.get("alias", [])),
        )

    def closure(self, names: Iterable[str]) -> tuple[Module, ...]:
        """The modules `names` and all they depend on, each after its dependencies; built-in ones are left out."""
        ordered: dict[str, Module] = {}

        def visit(name: str, trail: tuple[str, ...]) -> None:
            if name in ordered or name in self._builtin:
                return
            if name in trail:
                raise BuildError(f"order kernel modules: {' -> '.join((*trail, name))} is a circle")
            module = self.load(name)
            for dependency in module.depends:
                visit(dependency, (*trail, name))
            ordered[name] = module

        for name in names:
            visit(name, ())
        return tuple(ordered.values())


def modules_dep(modules: Iterable[Module]) -> str:
    """The text of modules.dep: each module's path and the paths of all it needs, the last to be loaded first.

    Source of the format: modules.dep(5); BusyBox modprobe reads the same file.
    """
    by_name = {module.name: module for module in modules}

    def needs(module: Module) -> list[str]:
        paths: list[str] = []
        for name in module.depends:
            if name in by_name:
                deeper = [by_name[name].path, *needs(by_name[name])]
                paths = [path for path in paths if path not in deeper] + deeper
        return paths

    lines = [" ".join([f"{module.path}:", *needs(module)]) for module in by_name.values()]
    return "".join(f"{line}\n" for line in sorted(lines))


def modules_alias(modules: Iterable[Module]) -> str:
    """The text of modules.alias: what the kernel may ask for, and the module that answers."""
    return "".join(f"alias {alias} {module.name}\n" for module in modules for alias in module.aliases)
