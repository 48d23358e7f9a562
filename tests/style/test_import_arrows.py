"""Which room may import which. A broken arrow is named with the file, the line, and what the room may import."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from .project_files import ROOT, module_name, parsed, python_files, shown

# room -> what it may import of ours, besides itself. The most specific room that holds a module counts.
# `serve` composes, `cli` and the entry points call every part; no other room may import those.
ARROWS: dict[str, tuple[str, ...]] = {
    "pyshim": (),
    "pyshim.__main__": ("pyshim",),
    "pyshim.serve": ("pyshim", "hypervisors", "protos"),
    "pyshim.template_maker": (
        *("pyshim.dry_run", "pyshim.pod", "pyshim.resources", "pyshim.agent", "pyshim.state", "pyshim.cleanup"),
        *("pyshim.concurrency", "pyshim.config", "pyshim.host", "pyshim.model", "pyshim.log", "hypervisors"),
    ),
    "pyshim.dry_run": ("pyshim.pod", "pyshim.resources", "pyshim.host", "pyshim.model"),
    "pyshim.zygote": ("pyshim",),
    "pyshim.log": (),
    "pyshim.debug": (),
    "pyshim.start": (),
    "pyshim.task": ("pyshim.model", "pyshim.ttrpc", "protos"),
    "pyshim.monitor": ("pyshim.host", "pyshim.model"),
    "pyshim.node.monitor": ("pyshim.monitor", "pyshim.concurrency", "pyshim.model"),
    "pyshim.pod": ("pyshim.resources", "pyshim.concurrency", "pyshim.model", "hypervisors.base"),
    "pyshim.resources": (
        "pyshim.host",
        "pyshim.concurrency",
        "pyshim.model",
        "pyshim.cdi",
        "pyshim.ttrpc",
        "hypervisors.base",
        "protos",
    ),
    "pyshim.agent": ("pyshim.concurrency", "pyshim.model", "pyshim.ttrpc", "protos"),
    "pyshim.concurrency": ("pyshim.model",),
    "pyshim.host": ("pyshim.model",),
    "pyshim.state": ("pyshim.host", "pyshim.model"),
    "pyshim.cleanup": (
        *("pyshim.start", "pyshim.task", "pyshim.state", "pyshim.resources", "pyshim.host", "pyshim.model"),
        "pyshim.ttrpc",
    ),
    "pyshim.config": ("pyshim.host", "pyshim.model"),
    "pyshim.model": (),
    "pyshim.node": (),
    "pyshim.node.kubernetes": ("pyshim.resources", "pyshim.config", "pyshim.model"),
    "pyshim.node.webhook": (
        *("pyshim.node.kubernetes", "pyshim.monitor", "pyshim.resources", "pyshim.config"),
        *("pyshim.concurrency", "pyshim.model"),
    ),
    "pyshim.node.nri": ("pyshim.state", "pyshim.host", "pyshim.concurrency", "pyshim.model", "pyshim.ttrpc", "protos"),
    "pyshim.node.dra": ("pyshim.node.kubernetes", "pyshim.resources", "pyshim.host", "pyshim.model", "protos"),
    "pyshim.node.install": (*("pyshim.node.kubernetes", "pyshim.host", "pyshim.start", "pyshim.model", "protos"),),
    "pyshim.tracing": ("pyshim.host", "pyshim.model"),
    "pyshim.node.cli": (
        *("pyshim.node", "pyshim.start", "pyshim.cleanup", "pyshim.config", "pyshim.pod", "pyshim.resources"),
        *("pyshim.state", "pyshim.host", "pyshim.model", "pyshim.cdi", "pyshim.tracing"),
        *("pyshim.dry_run", "pyshim.template_maker", "pyshim.log", "hypervisors.qemu"),
    ),
    # Libraries of their own.
    "pyshim.ttrpc": (),
    "pyshim.cdi": (),
    "hypervisors": (),
    "hypervisors.base": ("pyshim.model",),
    "hypervisors.qemu": ("hypervisors.base", "pyshim.host", "pyshim.concurrency", "pyshim.model"),
    "hypervisors.remote": ("hypervisors.base", "pyshim.concurrency", "pyshim.model", "pyshim.ttrpc", "protos"),
    "protos": (),
    "guest": (),
    "guest.agent": ("protos", "pyshim.ttrpc", "pyshim.cdi"),
    "guest.forwarder": ("guest.agent",),
    "guest.image": (),
    "guest.image.start": ("guest.agent",),
}
# room -> the third-party packages it may import; other rooms choose theirs.
_THIRD_PARTY: dict[str, tuple[str, ...]] = {
    "pyshim.model": ("msgspec",),
    "pyshim.ttrpc": ("google.protobuf",),
    "pyshim.start": (),
    "guest.agent": ("google.protobuf", "yaml"),
    "guest.forwarder": (),
}
# Inside the agent each line may import itself and those after it; every other module of the agent is below all of them.
_AGENT_LAYERS = (
    ("guest.agent.__main__",),
    ("guest.agent.service",),
    ("guest.agent.calls",),
    ("guest.agent.container",),
    ("guest.agent.storage",),
    ("guest.agent.pull",),
)
_OURS = ("pyshim", "hypervisors", "protos", "guest", "integration", "tests", "bench")
# Protobuf types end at these edges; inside, everything is model.
_PROTOBUF_EDGES = (
    *("pyshim/task/", "pyshim/agent/", "pyshim/resources/devices/host/kubelet.py", "hypervisors/remote/service.py"),
    "pyshim/node/install/cri.py",
    "pyshim/tracing/child.py",
    "pyshim/node/dra/plugin.py",
    "pyshim/node/nri/translate.py",
    "pyshim/ttrpc/messages.py",
    "pyshim/ttrpc/envelope_pb2.py",
    "protos/",
)
# Files of these names decide and touch nothing: they take values and return values.
_PURE_NAMES = ("plan",)
_PURE = (
    "pyshim.model",
    "pyshim.node.dra.slices",
    "pyshim.node.nri.assignments",
    "pyshim.node.nri.policies",
    "hypervisors.qemu.cmdline",
    "pyshim.ttrpc.framing",
)
_DOTTED = re.compile(r"\w+(\.\w+)+")
_IMPURE_LIBRARIES = ("asyncio", "os", "socket", "subprocess", "time", "random")


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    module: str
    line: int


@cache
def imports_of(path: Path) -> tuple[Import, ...]:
    """Every import in the file, relative ones made absolute, function-level and typing-only ones included.

    A module that is named in a string is one of them: a child imports it, or the command's table of verbs.
    """
    return tuple(_imports_of(path))


def _imports_of(path: Path) -> Iterator[Import]:
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module=alias.name, line=node.lineno)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *([base] if base else [])])
            for alias in node.names:
                yield Import(module=f"{base}.{alias.name}", line=node.lineno)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            module = node.value.partition(":")[0]
            if _DOTTED.fullmatch(module) and (ROOT / f"{module.replace('.', '/')}.py").exists():
                yield Import(module=module, line=node.lineno)


def _within(module: str, room: str) -> bool:
    return module == room or module.startswith(room + ".")


def _is_ours(module: str) -> bool:
    return any(_within(module, ours) for ours in _OURS)


def room_of(module: str) -> str:
    """The most specific room of the table. Raises AssertionError for a module no room holds."""
    rooms = [room for room in ARROWS if _within(module, room)]
    assert rooms, f"{module} is in no room: add it to ARROWS"
    return max(rooms, key=len)


_STANDARD = sys.stdlib_module_names | {"_sha256", "_sha2"}
"""The last two are one module, which has its second name since CPython 3.12."""


def broken_arrows(path: Path) -> list[str]:
    room = room_of(module_name(path))
    may = ", ".join(ARROWS[room]) or "nothing of ours"
    return [
        f"{shown(path)}:{wanted.line}: {room} -> {wanted.module} (it may import: {may})"
        for wanted in imports_of(path)
        if _is_ours(wanted.module) and not any(_allows(target, wanted.module) for target in (room, *ARROWS[room]))
    ]


def _allows(target: str, module: str) -> bool:
    # The bare package holds the version and the supported Pythons and no code: every room may read it.
    return _within(module, target) or module in ("pyshim", "pyshim.__version__", "pyshim.PYTHONS")


def _sources(*below: str) -> list[Path]:
    return list(python_files(*below))


def test_imports_follow_the_arrows() -> None:
    broken = [line for path in _sources("pyshim", "hypervisors", "protos", "guest") for line in broken_arrows(path)]

    assert broken == []


def test_no_shim_imports_what_runs_beside_it() -> None:
    """`__main__` alone does: it is the entry of both programs."""
    strays = [
        f"{shown(path)}:{wanted.line}: {wanted.module}"
        for path in _sources("pyshim", "hypervisors", "guest")
        if not _within(module_name(path), "pyshim.node") and module_name(path) != "pyshim.__main__"
        for wanted in imports_of(path)
        if _within(wanted.module, "pyshim.node")
    ]

    assert strays == []


def test_rooms_that_must_be_small_use_the_standard_library_and_what_is_listed() -> None:
    foreign = [
        f"{shown(path)}:{wanted.line}: {wanted.module}"
        for path in _sources("pyshim", "guest")
        for room, packages in _THIRD_PARTY.items()
        if _within(module_name(path), room)
        for wanted in imports_of(path)
        if not _is_ours(wanted.module) and wanted.module.split(".")[0] not in _STANDARD
        if not any(_within(wanted.module, package) for package in packages)
    ]

    assert foreign == []


def test_inside_the_agent_imports_run_one_way() -> None:
    upwards = [
        f"{shown(path)}:{wanted.line}: {wanted.module}"
        for path in _agent_files().values()
        for wanted in imports_of(path)
        if _within(wanted.module, "guest.agent") and _agent_layer(wanted.module) < _agent_layer(module_name(path))
    ]

    assert upwards == []


def _agent_files() -> dict[str, Path]:
    """The agent's files by module."""
    found = {module_name(path): path for path in _sources("guest") if _within(module_name(path), "guest.agent")}
    assert found, "the agent has files"
    return found


def _agent_layer(module: str) -> int:
    found = [number for number, rooms in enumerate(_AGENT_LAYERS) if any(_within(module, room) for room in rooms)]
    return found[0] if found else len(_AGENT_LAYERS)


def test_inside_the_agent_no_files_import_each_other() -> None:
    """Also not by way of others, and not inside functions."""
    files = _agent_files()
    order = TopologicalSorter({module: _files_imported(path, files) for module, path in files.items()})

    try:
        order.prepare()
        circle = []
    except CycleError as error:
        circle = error.args[1]

    assert circle == []


def _files_imported(path: Path, files: Mapping[str, Path]) -> set[str]:
    """The modules among `files` whose content the file imports."""
    wanted = {imported.module for imported in imports_of(path)}
    return {
        module
        for each in wanted
        for module in (each, each.rpartition(".")[0])
        if module in files and module != "guest.agent"
    }


def test_protobuf_types_stay_at_the_edges() -> None:
    strays = [
        f"{shown(path)}:{wanted.line}: {wanted.module}"
        for path in _sources("pyshim", "hypervisors")
        if not shown(path).startswith(_PROTOBUF_EDGES)
        for wanted in imports_of(path)
        if _within(wanted.module, "google.protobuf") or "_pb2" in wanted.module
    ]

    assert strays == []


def test_plans_and_nouns_are_pure() -> None:
    """What is named `plan` decides: it imports neither the event loop nor the system."""
    impure = [
        f"{shown(path)}:{wanted.line}: {wanted.module}"
        for path in _sources("pyshim", "hypervisors")
        if _is_pure(module_name(path))
        for wanted in imports_of(path)
        if wanted.module.split(".")[0] in _IMPURE_LIBRARIES and not _within(wanted.module, "os.path")
    ]

    assert impure == []


def _is_pure(module: str) -> bool:
    return any(name in module.split(".") for name in _PURE_NAMES) or any(_within(module, room) for room in _PURE)


def test_children_are_not_spawned_by_asyncio() -> None:
    """`host/processes/children.py` spawns and reaps, by pidfd."""
    used = [
        f"{shown(path)}:{wanted.line}"
        for path in _sources("pyshim", "hypervisors")
        for wanted in imports_of(path)
        if wanted.module.startswith("asyncio.subprocess")
    ]

    assert used == []


def test_every_room_of_the_table_exists() -> None:
    modules = {module_name(path) for path in _sources("pyshim", "hypervisors", "protos", "guest")}

    assert [room for room in ARROWS if room not in modules] == []


def test_the_architecture_document_has_the_same_arrows() -> None:
    """Its table names modules without `pyshim.`, and may put several rooms in a row."""
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    table = text.split("| Room | May import of ours |\n|---|---|\n")[1].split("\n\n")[0]
    documented: dict[str, set[str]] = {}
    for row in table.splitlines():
        rooms, may = (set(re.findall(r"`([^`]+)`", cell)) for cell in row.strip("|").split("|"))
        documented |= dict.fromkeys(rooms, may)

    assert documented == {
        room.removeprefix("pyshim."): {name.removeprefix("pyshim.") for name in may} for room, may in ARROWS.items()
    }
