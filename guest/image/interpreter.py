"""The interpreter's side of the image: the trimmed standard library and our code, all as byte code.

Everything is compiled by the guest's own interpreter, run from its unpacked package: the result does not depend on
the build host's Python. Modules are kept without sources, so the interpreter neither looks for a source nor compares
times.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from guest.image.debian import run
from guest.image.errors import BuildError
from guest.image.recipe import EXTENSION_MODULES, STDLIB_WITHOUT

STDLIB = "usr/lib/python3.11"
_DIST_PACKAGES = "usr/lib/python3/dist-packages"
AGENT_ROOT = "usr/lib/agent"
_PYC_HEADER_BYTES = 16  # PEP 552
_EXTENSION_SUFFIX = ".cpython-311-x86_64-linux-gnu.so"

# Reads [[source, byte code, name shown in tracebacks, optimisation], ...]. UNCHECKED_HASH: no time stamp in the file,
# none looked at.
_COMPILE = """
import json, py_compile, sys
mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
for source, target, shown, level in json.load(open(sys.argv[1])):
    py_compile.compile(source, target, shown, doraise=True, optimize=level, invalidation_mode=mode)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One file to be placed in the guest at `path`: a module to compile at `optimize`, or a file to copy."""

    path: str
    file: Path
    optimize: int = 0

    @property
    def is_module(self) -> bool:
        return self.file.suffix == ".py"


def stdlib_sources(packages: Iterable[Path]) -> list[Source]:
    """The standard library modules of the unpacked `packages` that are wanted; docstrings and assertions go.

    A package that a diverted path hides twice is an error of Debian, not ours: the first one counts.
    """
    found: dict[str, Source] = {}
    for package in packages:
        root = package / STDLIB
        for file in sorted(root.rglob("*.py")):
            name = file.relative_to(root).as_posix()
            parents = {"/".join(name.split("/")[: depth + 1]) for depth in range(name.count("/") + 1)}
            if not parents & STDLIB_WITHOUT and not file.is_symlink():
                found.setdefault(name, Source(path=f"{STDLIB}/{name}", file=file, optimize=2))
        for module in EXTENSION_MODULES:
            file = root / "lib-dynload" / f"{module}{_EXTENSION_SUFFIX}"
            if file.exists():
                name = f"lib-dynload/{file.name}"
                found.setdefault(name, Source(path=f"{STDLIB}/{name}", file=file))
    return list(found.values())


def library_sources(package: Path, name: str) -> list[Source]:
    """The modules of the library `name` in an unpacked package, placed where the standard library is.

    Extension modules stay behind: they would bring shared libraries along for a little speed.
    """
    root = package / _DIST_PACKAGES
    sources = [
        Source(path=f"{STDLIB}/{file.relative_to(root).as_posix()}", file=file, optimize=2)
        for file in sorted((root / name).rglob("*.py"))
    ]
    if not sources:
        raise BuildError(f"take library {name}: it is not in {root}")
    return sources


def bundle(modules: Iterable[tuple[str, bytes]]) -> bytes:
    """Byte-code files as one file for `start.py`: an index of names, then their code without the headers.

    `modules` pairs an import path below a root (`a/b.pyc`, `a/__init__.pyc`) with the file's content. Index lines read
    `name is_package offset length`; the first line is the length of the index.
    """
    lines, body = [], bytearray()
    for path, data in modules:
        name = path.removesuffix(".pyc").replace("/", ".")
        code = data[_PYC_HEADER_BYTES:]
        lines.append(f"{name.removesuffix('.__init__')} {name.endswith('.__init__'):d} {len(body)} {len(code)}\n")
        body += code
    index = "".join(lines).encode()
    return b"%d\n" % len(index) + index + body


def with_bundle(content: dict[str, bytes], stdlib_modules: Iterable[str]) -> dict[str, bytes]:
    """`content` with the agent's modules in one bundle in place of files, `stdlib_modules` copied in beside them."""
    entry = f"{AGENT_ROOT}/start.pyc"
    own = {path for path in content if path.startswith(f"{AGENT_ROOT}/") and path.endswith(".pyc")} - {entry}
    members = [(path.removeprefix(f"{AGENT_ROOT}/"), content[path]) for path in sorted(own)]
    for name in stdlib_modules:
        stem = name.replace(".", "/")
        path = next((p for p in (f"{stem}.pyc", f"{stem}/__init__.pyc") if f"{STDLIB}/{p}" in content), None)
        if path is None:
            raise BuildError(f"bundle module {name}: not in the trimmed standard library")
        members.append((path, content[f"{STDLIB}/{path}"]))
    rest = {path: data for path, data in content.items() if path not in own}
    return {**rest, f"{AGENT_ROOT}/bundle": bundle(members)}


def agent_sources(checkout: Path, folders: Iterable[str]) -> list[Source]:
    """Our own modules below `folders`; assertions stay, they are part of the program."""
    sources = []
    for folder in folders:
        start = checkout / folder
        if not start.exists():
            raise BuildError(f"take agent sources: {folder} is not in {checkout}")
        files = [start] if start.is_file() else sorted(start.rglob("*.py"))
        sources += [
            Source(path=f"{AGENT_ROOT}/{file.relative_to(checkout).as_posix()}", file=file)
            for file in files
            if "__pycache__" not in file.parts and not file.name.endswith("_grpc.py")
        ]
    return sources


def compiled(sources: Iterable[Source], python_argv: list[str], scratch: Path) -> dict[str, bytes]:
    """Guest path to content for all `sources`; modules become byte code in place of their source.

    `python_argv` starts the guest's interpreter on this machine. One process compiles all, in the order given: byte
    code of equal sources is equal only for an equal history of the interpreter.
    """
    jobs = []
    placed: dict[str, Path] = {}
    for number, source in enumerate(sources):
        if source.is_module:
            target = scratch / f"{number}.pyc"
            jobs.append([str(source.file), str(target), f"/{source.path}", source.optimize])
            placed[source.path.removesuffix(".py") + ".pyc"] = target
        else:
            placed[source.path] = source.file
    job_file = scratch / "jobs.json"
    job_file.write_text(json.dumps(jobs))
    run([*python_argv, "-c", _COMPILE, str(job_file)], env={"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8"})
    return {path: file.read_bytes() for path, file in placed.items()}
