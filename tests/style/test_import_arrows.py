"""Which room may import which. A broken arrow is named with the file, the line, and what the room may import."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from .project_files import ROOT, module_name, parsed, python_files, shown

# room -> what it may import of ours, besides itself. The most specific room that holds a module counts.
# `serve` composes, `operator` and the entry points call every part; nothing may import those.
ARROWS: dict[str, tuple[str, ...]] = {
    "pyshim": (),
    "pyshim.__main__": ("pyshim",),
    "pyshim.serve": ("pyshim", "hypervisors", "protos"),
    "pyshim.zygote": ("pyshim",),
    "pyshim.rehearsal": ("pyshim", "hypervisors"),
    "pyshim.log": (),
    "pyshim.debug": (),
    "pyshim.operator": (
        *(
            "pyshim.bootstrap",
            "pyshim.config",
            "pyshim.plan",
            "pyshim.model",
            "pyshim.state",
            "pyshim.host",
            "pyshim.cdi",
            "pyshim.instances",
            "hypervisors.base",
        ),
    ),
    "pyshim.bootstrap": (),
    "pyshim.bootstrap.delete": ("pyshim.bootstrap", "pyshim.model", "pyshim.state", "pyshim.host"),
    "pyshim.bootstrap.conventions": ("pyshim.bootstrap", "pyshim.model", "pyshim.host"),
    "pyshim.bootstrap.remote_vms": ("pyshim.bootstrap", "pyshim.model", "pyshim.host"),
    "pyshim.bootstrap.leftovers": ("pyshim.bootstrap", "pyshim.model", "pyshim.state", "pyshim.host"),
    "pyshim.model": (),
    # hypervisors.base holds the nouns of a VM (VmConfig, its devices): data that plans are made of and the host opens.
    "pyshim.plan": ("pyshim.model", "hypervisors.base"),
    "pyshim.config": ("pyshim.model", "pyshim.host.whole_files"),
    "pyshim.state": ("pyshim.model", "pyshim.host.trees", "pyshim.host.whole_files"),
    "pyshim.host": ("pyshim.model", "hypervisors.base", "pyshim.cdi"),
    # The undo of a remote VM is a call.
    "pyshim.host.remote_vms": ("pyshim.host", "pyshim.model", "pyshim.ttrpc"),
    "pyshim.ttrpc": (),
    # A library of its own, used by host and guest.
    "pyshim.cdi": (),
    "pyshim.instances": (),
    "pyshim.kubelet": ("pyshim.model", "protos"),
    "pyshim.devices": ("pyshim.kubelet", "pyshim.cdi", "pyshim.host", "pyshim.model"),
    "pyshim.task": ("pyshim.sandbox", "pyshim.model", "pyshim.ttrpc", "protos"),
    "pyshim.sandbox": ("pyshim.plan", "pyshim.model", "pyshim.state", "hypervisors.base"),
    "pyshim.agent": ("pyshim.model", "pyshim.ttrpc", "protos"),
    # Wraps the seams in points where things go wrong; only `serve` loads it, when a test asks for faults.
    "pyshim.failpoints": ("pyshim.sandbox", "pyshim.model", "pyshim.ttrpc", "hypervisors.base"),
    "hypervisors": (),
    "hypervisors.base": ("pyshim.model",),
    "hypervisors.qemu": ("hypervisors.base", "pyshim.model", "pyshim.host"),
    "hypervisors.remote": ("hypervisors.base", "pyshim.model", "pyshim.ttrpc", "protos"),
    "protos": (),
    "guest": (),
    "guest.agent": ("protos", "pyshim.ttrpc", "pyshim.cdi"),
    "guest.image": ("guest.snapshot",),
    "guest.forwarder": ("guest.agent",),
    "guest.snapshot": ("guest.agent",),
    "guest.image.start": (
        "guest.agent",
        "guest.forwarder",
        "guest.snapshot",
    ),  # goes into the image, in front of the agent
}
# Needed only to name a type: allowed under `if TYPE_CHECKING`, where nothing is imported when the program runs.
TYPING_ONLY: dict[str, tuple[str, ...]] = {
    "pyshim.host": ("pyshim.plan",),
    "pyshim.sandbox": ("pyshim.agent", "pyshim.host"),
}
_STANDARD_LIBRARY_ONLY = (
    "pyshim.model",
    "pyshim.ttrpc",
    "pyshim.bootstrap",
    "guest.agent",
    "guest.forwarder",
    "guest.snapshot",
)
_OURS = ("pyshim", "hypervisors", "protos", "guest", "integration", "tests", "bench")
# Protobuf types end at these edges; inside, everything is model.
_PROTOBUF_EDGES = ("pyshim/task/", "pyshim/agent/", "pyshim/kubelet/", "hypervisors/remote/service.py", "protos/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    module: str
    line: int
    typing_only: bool


def imports_of(path: Path) -> Iterator[Import]:
    """Every import in the file, relative ones made absolute, function-level ones included."""
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    tree = parsed(path)
    guarded = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and _names_type_checking(node.test)
        for child in node.body
        for inner in ast.walk(child)
    }
    for node in ast.walk(tree):
        typing_only = id(node) in guarded
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module=alias.name, line=node.lineno, typing_only=typing_only)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *([base] if base else [])])
            for alias in node.names:
                yield Import(module=f"{base}.{alias.name}", line=node.lineno, typing_only=typing_only)


def _names_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def _within(module: str, room: str) -> bool:
    return module == room or module.startswith(room + ".")


def room_of(module: str) -> str:
    """The most specific room of the table. Raises AssertionError for a module no room holds."""
    rooms = [room for room in ARROWS if _within(module, room)]
    assert rooms, f"{module} is in no room: add it to ARROWS"
    return max(rooms, key=len)


def _home(room: str) -> str:
    """A module with a rule of its own is still part of its room: it may import its neighbours."""
    return room if room.count(".") < 2 else room.rpartition(".")[0]


def broken_arrows(path: Path) -> list[str]:
    source = module_name(path)
    room = room_of(source)
    broken = []
    for wanted in imports_of(path):
        if not any(_within(wanted.module, ours) for ours in _OURS):
            continue
        allowed = (_home(room), *ARROWS[room], *(TYPING_ONLY.get(room, ()) if wanted.typing_only else ()))
        if not any(_allows(target, wanted.module) for target in allowed):
            may = ", ".join(ARROWS[room]) or "nothing of ours"
            broken.append(f"{shown(path)}:{wanted.line}: {room} -> {wanted.module} (it may import: {may})")
    return broken


def _allows(target: str, module: str) -> bool:
    # The bare package holds the version and no code: everyone may read it.
    return _within(module, target) or module in ("pyshim", "pyshim.__version__")


_SOURCES = list(python_files("pyshim", "hypervisors", "protos", "guest"))


@pytest.mark.parametrize("path", _SOURCES, ids=shown)
def test_imports_follow_the_arrows(path: Path) -> None:
    assert broken_arrows(path) == []


@pytest.mark.parametrize("path", _SOURCES, ids=shown)
def test_rooms_that_must_start_fast_use_the_standard_library_only(path: Path) -> None:
    if not any(_within(module_name(path), room) for room in _STANDARD_LIBRARY_ONLY):
        return
    foreign = [
        f"{shown(path)}:{wanted.line}: {wanted.module}"
        for wanted in imports_of(path)
        if not any(_within(wanted.module, ours) for ours in _OURS)
        and wanted.module.split(".")[0] not in sys.stdlib_module_names
    ]

    assert foreign == []


@pytest.mark.parametrize("path", list(python_files("pyshim", "hypervisors")), ids=shown)
def test_protobuf_types_stay_at_the_edges(path: Path) -> None:
    used = [w for w in imports_of(path) if _within(w.module, "google.protobuf") or "_pb2" in w.module]

    assert not used or shown(path).startswith(_PROTOBUF_EDGES), [f"{shown(path)}:{w.line}: {w.module}" for w in used]


@pytest.mark.parametrize("path", list(python_files("pyshim", "hypervisors")), ids=shown)
def test_data_classes_are_those_that_share_their_methods(path: Path) -> None:
    """Except in libraries of their own, which may not know pyshim.model."""
    room = room_of(module_name(path))
    reachable = (_home(room), *ARROWS[room])
    if path.name == "dataclasses.py" or not any(_within("pyshim.model", each) for each in reachable):
        return
    originals = [f"{shown(path)}:{w.line}" for w in imports_of(path) if w.module == "dataclasses.dataclass"]

    assert originals == [], "use pyshim.model.dataclasses"


@pytest.mark.parametrize("path", list(python_files("pyshim", "hypervisors")), ids=shown)
def test_no_asyncio_subprocess_and_no_event_loop_in_pure_rooms(path: Path) -> None:
    """Children go through host/processes/children.py, by pidfd; model and plan are pure."""
    pure = ("pyshim.model", "pyshim.plan", "pyshim.bootstrap", "hypervisors.qemu.cmdline", "pyshim.ttrpc.framing")
    is_pure = any(_within(module_name(path), room) for room in pure)
    for wanted in imports_of(path):
        assert not wanted.module.startswith("asyncio.subprocess"), f"{shown(path)}:{wanted.line}"
        assert not (is_pure and _within(wanted.module, "asyncio")), f"{shown(path)}:{wanted.line}: {wanted.module}"


def test_every_room_of_the_table_exists() -> None:
    modules = {module_name(path) for path in _SOURCES}

    assert [room for room in ARROWS if room not in modules] == []


def test_the_architecture_document_has_the_same_arrows() -> None:
    """Its table names modules without `pyshim.`, leaves out a room's own, and may put several rooms in a row."""
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    table = text.split("| Room | May import of ours | For types only |\n|---|---|---|\n")[1].split("\n\n")[0]
    documented: dict[str, tuple[set[str], set[str]]] = {}
    for row in table.splitlines():
        rooms, may, typing_only = (set(re.findall(r"`([^`]+)`", cell)) for cell in row.strip("|").split("|"))
        documented |= dict.fromkeys(rooms, (may, typing_only))

    def short(names: tuple[str, ...], own: str) -> set[str]:
        return {name.removeprefix("pyshim.") for name in names} - {own.removeprefix("pyshim.")}

    assert documented == {
        room.removeprefix("pyshim."): (short(may, _home(room)), short(TYPING_ONLY.get(room, ()), room))
        for room, may in ARROWS.items()
    }


def test_a_broken_arrow_is_found_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test of the test: one forbidden import of each form is reported, an allowed one is not."""
    import tests.style.project_files as project

    monkeypatch.setattr(project, "ROOT", tmp_path)
    path = tmp_path / "pyshim" / "plan" / "bad.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        "from pyshim.model import ids\n"
        "from pyshim.host.files import read\n"
        "from ..state import store\n"
        "def later():\n    import hypervisors.qemu\n"
    )

    assert broken_arrows(path) == [
        "pyshim/plan/bad.py:2: pyshim.plan -> pyshim.host.files.read (it may import: pyshim.model, hypervisors.base)",
        "pyshim/plan/bad.py:3: pyshim.plan -> pyshim.state.store (it may import: pyshim.model, hypervisors.base)",
        "pyshim/plan/bad.py:5: pyshim.plan -> hypervisors.qemu (it may import: pyshim.model, hypervisors.base)",
    ]
