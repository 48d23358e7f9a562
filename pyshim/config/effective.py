"""The effective configuration of a document: the value and origin of every key, and findings about what was written.

All mistakes are collected: `pyshim config check` shows every one, the start of a sandbox raises the first.
"""

import difflib
import os
from collections.abc import Iterator, Mapping
from enum import IntEnum
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from pyshim.config.catalogue import FIXED_VALUES, keys_for, nearest, spellings
from pyshim.config.catalogue import NAME as REMOTE
from pyshim.config.keys import Alias, Key, Table, Verdict, document_table
from pyshim.config.keys_runtime import EXPECTED, OTHER_VMMS, REMOVED, REMOVED_TABLES
from pyshim.config.sources import Source, SourceLine
from pyshim.config.values import PATH, WithoutEffect, toml_value
from pyshim.model.architecture import ARCHITECTURES, MACHINE_TYPES, X86_64, machine_types_of
from pyshim.model.units import HUGEPAGE_MIB

PROGRAM_PATHS: Mapping[str, tuple[str, ...]] = {
    "path": tuple(dict.fromkeys(path for each in ARCHITECTURES.values() for path in each.qemu_paths)),
    "virtio_fs_daemon": (
        "/usr/libexec/virtiofsd",
        "/usr/lib/virtiofsd",
        "/opt/kata/libexec/virtiofsd",
        "/usr/lib/qemu/virtiofsd",
    ),
    "vhost_user_vsock_daemon": (
        "/usr/libexec/vhost-device-vsock",
        "/usr/bin/vhost-device-vsock",
        "/usr/local/bin/vhost-device-vsock",
    ),
}
"""By key, the paths where a program is searched for if its key is empty: those of Debian, Fedora and kata-deploy. Of
`path`, those of the architecture of `machine_type` count."""
FORCE_GUEST_PULL = "force_guest_pull"
"""The only feature that `experimental` may name."""
SUPPORTED_HYPERVISORS = frozenset({"qemu", REMOTE})
UNSUPPORTED = f"is not supported, only {' and '.join(sorted(SUPPORTED_HYPERVISORS))}"
_TOP_LEVEL_TABLES = ("hypervisor", "agent", "runtime", "factory")


class Level(IntEnum):
    FINE = 0
    NOTE = 1
    WARNING = 2
    ERROR = 3


class Finding(NamedTuple):
    """A remark about one key, table or annotation."""

    level: Level
    subject: str
    """The dotted key or table as it was written, or the annotation."""
    text: str
    verdict: Verdict | None = None
    """None for an invalid value or table, and for a remark on how a value was written."""
    place: SourceLine | None = None
    differs: bool = True
    """The value is not the default, so a key without effect is worth a warning."""


class Setting(NamedTuple):
    """The effective value of a key, and where it was set."""

    key: Key
    value: Any
    place: SourceLine | None
    """The key's line in a file; None if an annotation set it, if nothing did, or if the document was not a text."""
    annotation: str
    """The annotation that set it; empty if none did."""
    is_default: bool
    """Neither a file nor an annotation has set it."""

    @property
    def verdict(self) -> Verdict:
        return self.key.verdict_of(self.value)

    @property
    def origin(self) -> str:
        """Where the value was set, for people."""
        if self.annotation:
            return f"annotation {self.annotation}"
        return "default" if self.is_default else str(self.place) if self.place else "file"


class Effective(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The effective configuration: a setting for every key."""

    source: Source
    hypervisor: str
    """The hypervisor of its sandboxes: NAME of the table `hypervisor.NAME`."""
    architecture: str
    """The node's, as `uname -m` says it."""
    settings: Mapping[tuple[Table, str], Setting]
    findings: tuple[Finding, ...]

    def of(self, table: Table, name: str) -> Setting:
        return self.settings[table, name]

    def dotted(self, key: Key) -> str:
        """The key's full name in a file, such as `hypervisor.qemu.path`."""
        return f"{document_table(key.table, self.hypervisor)}.{key.name}"

    def with_settings(self, changed: Mapping[tuple[Table, str], Setting]) -> "Effective":
        return replace(self, settings={**self.settings, **changed})

    def errors(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.level is Level.ERROR)


def examine(source: Source, hypervisor_name: str = "", architecture: str = os.uname().machine) -> Effective:
    """The effective configuration of `source` on a node of this architecture, as `uname -m` says it.

    `hypervisor_name`, unless empty, replaces the choice of the document.
    """
    reader = _Reader(source, hypervisor_name)
    settings = {(key.table, key.name): reader.setting(key) for key in keys_for(reader.hypervisor)}
    settings |= derived(settings, reader.hypervisor, architecture)
    if reader.hypervisor in SUPPORTED_HYPERVISORS:
        findings = [*reader.findings, *reader.unknown(), *contradictions(settings, reader.hypervisor)]
    else:  # the keys may be right for that hypervisor
        findings = [reader.unsupported()]
    return Effective(
        source=source,
        hypervisor=reader.hypervisor,
        architecture=architecture,
        settings=settings,
        findings=tuple(sorted(findings, key=_document_order)),
    )


def derived(
    settings: Mapping[tuple[Table, str], Setting], hypervisor: str, architecture: str
) -> Mapping[tuple[Table, str], Setting]:
    """The settings that follow from others, and from the node's architecture; the first two as in Kata's Rust runtime.

    - sizing_policy is `overhead` if overhead_vcpus or overhead_memory is set and no policy is.
    - experimental_force_guest_pull is true if `experimental` names this feature.
    - An empty machine_type is the first of the node's architecture, and an empty path is the QEMU for it.
    """
    changed: dict[tuple[Table, str], Setting] = {}
    if hypervisor != REMOTE:
        machine_type, path = settings[Table.HYPERVISOR, "machine_type"], settings[Table.HYPERVISOR, "path"]
        own = machine_types_of(ARCHITECTURES.get(architecture, X86_64))[0]
        machine_type = machine_type._replace(value=machine_type.value or own)
        if not path.value:
            path = _first_present(path, MACHINE_TYPES[machine_type.value].architecture.qemu_paths)
        changed |= {(Table.HYPERVISOR, "machine_type"): machine_type, (Table.HYPERVISOR, "path"): path}
    policy = settings[Table.RUNTIME, "sizing_policy"]
    for name in ("overhead_memory", "overhead_vcpus"):
        overhead = settings[Table.HYPERVISOR, name]
        if policy.is_default and not overhead.is_default:
            chosen = policy._replace(value="overhead", place=overhead.place, is_default=False)
            changed[Table.RUNTIME, "sizing_policy"] = chosen
    features, pull = settings[Table.RUNTIME, "experimental"], settings[Table.RUNTIME, "experimental_force_guest_pull"]
    if FORCE_GUEST_PULL in features.value and not pull.value:
        changed[Table.RUNTIME, pull.key.name] = features._replace(key=pull.key, value=True)
    return changed


def _document_order(finding: Finding) -> tuple[int, int]:
    return (finding.place.layer, finding.place.line) if finding.place else (-1, 0)


class _Occurrence(NamedTuple):
    """A key in the document, under one of its spellings. `value` is not converted yet."""

    spelling: Key | Alias
    path: tuple[str, ...]
    value: Any
    place: SourceLine | None


class _Reader:
    def __init__(self, source: Source, hypervisor_name: str) -> None:
        self._source = source
        self._not_tables: set[tuple[str, ...]] = set()
        self.findings: list[Finding] = []
        self.hypervisor = hypervisor_name or self._chosen_hypervisor()
        self._tables = tuple((table, path, self._table(path)) for table, path in self._table_paths())
        self._values: dict[tuple[Table, str], list[tuple[tuple[str, ...], Any]]] = {}
        """By table and name: each path in the document, and the value there."""
        for table, path, values in self._tables:
            for name, value in values.items():
                self._values.setdefault((table, name), []).append(((*path, name), value))

    def _chosen_hypervisor(self) -> str:
        """runtime.hypervisor_name, as in Kata's Rust runtime; else a hypervisor that has a table, as in its Go one."""
        named = self._table(("runtime",)).get("hypervisor_name")
        if isinstance(named, str) and named:
            return named
        present = [name for name, table in self._table(("hypervisor",)).items() if isinstance(table, dict)]
        return "qemu" if "qemu" in present or not present else present[0]

    def setting(self, key: Key) -> Setting:
        """The key's effective value; the default if it is absent or if no value of it is valid. Adds findings."""
        results: list[tuple[_Occurrence, Any]] = []
        for each in self._occurrences(key):
            try:
                results.append((each, self._value(key, each)))
            except WithoutEffect as exc:
                self.findings.append(self._finding(Level.WARNING, each.path, str(exc), Verdict.REMOVED))
            except ValueError as exc:
                self.findings.append(self._finding(Level.ERROR, each.path, str(exc)))
        if not results:
            return _located(Setting(key, key.default, None, annotation="", is_default=True), self._source)
        last, value = max(results, key=lambda result: result[0].place.layer if result[0].place else 0)
        for each, other in results:
            if other != value and (not each.place or not last.place or each.place.layer == last.place.layer):
                text = f"contradicts {'.'.join(last.path)}, which is the same key"
                self.findings.append(self._finding(Level.ERROR, each.path, text))
        for each, other in results:
            verdict = key.verdict_of(other)
            level = Level.FINE if verdict is Verdict.HONOURED else Level.NOTE
            differs = other != key.default
            self.findings.append(self._finding(level, each.path, key.why_of(other), verdict, differs=differs))
        return _located(Setting(key, value, last.place, annotation="", is_default=False), self._source)

    def _value(self, key: Key, each: _Occurrence) -> Any:
        """The occurrence's value. Adds a warning if it is limited or under a former name. Raises ValueError."""
        kind, text = each.spelling.kind, ""
        value = key.default if key.is_blank(each.value) else kind.convert(each.value)
        if kind.most is not None and value > kind.most:
            value, text = kind.most, f"is limited to {kind.most}"
        elif isinstance(each.spelling, Alias) and each.spelling.is_former:
            text = f"is called {key.name} now, and the value {toml_value(value)}"
        if text:
            self.findings.append(self._finding(Level.WARNING, each.path, text))
        return value

    def unsupported(self) -> Finding:
        """The error about a hypervisor that pyshim has not, at the line that chooses it."""
        name = self.hypervisor
        path = ("hypervisor", name) if name in self._table(("hypervisor",)) else ("runtime", "hypervisor_name")
        if name in OTHER_VMMS:
            text = f"{UNSUPPORTED}: the file is for another VMM"
        else:
            near = difflib.get_close_matches(name, SUPPORTED_HYPERVISORS, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            text = f"{UNSUPPORTED}{hint}"
        return Finding(Level.ERROR, f"hypervisor.{name}", text, place=self._source.lines.get(path))

    def unknown(self) -> Iterator[Finding]:
        """Findings about the names in the document that are not keys or tables of its sandboxes."""
        for name, value in self._source.document.items():
            if name not in _TOP_LEVEL_TABLES:
                yield self._unread((name,), value)
        known_tables = {path for _, path, _ in self._tables}
        for table, path, values in self._tables:
            for name, value in values.items():
                if (table, name) in spellings() or (*path, name) in known_tables:
                    continue
                yield self._unknown_key(table, (*path, name), value)
        for group in ("hypervisor", "agent"):
            for name, value in self._table((group,)).items():
                if (group, name) not in {("hypervisor", self.hypervisor), ("agent", "kata")}:
                    yield self._unread((group, name), value)

    def _occurrences(self, key: Key) -> list[_Occurrence]:
        return [
            _Occurrence(spelling, path, value, self._source.lines.get(path))
            for spelling in key.spellings
            for path, value in self._values.get((spelling.table, spelling.name), ())
        ]

    def _table_paths(self) -> tuple[tuple[Table, tuple[str, ...]], ...]:
        """The path of each table in the document. Kata's Rust runtime has the factory within the hypervisor's table."""
        return (
            (Table.HYPERVISOR, ("hypervisor", self.hypervisor)),
            (Table.AGENT, ("agent", "kata")),
            (Table.MEM_AGENT, ("agent", "kata", "mem_agent")),
            (Table.RUNTIME, ("runtime",)),
            (Table.FACTORY, ("factory",)),
            (Table.FACTORY, ("hypervisor", self.hypervisor, "factory")),
        )

    def _table(self, path: tuple[str, ...]) -> Mapping[str, Any]:
        table: Mapping[str, Any] = self._source.document
        for depth, name in enumerate(path, start=1):
            inner = table.get(name, {})
            if not isinstance(inner, dict):
                if path[:depth] not in self._not_tables:
                    self._not_tables.add(path[:depth])
                    self.findings.append(self._finding(Level.ERROR, path[:depth], "is not a table"))
                return {}
            table = inner
        return table

    def _unknown_key(self, table: Table, path: tuple[str, ...], value: Any) -> Finding:
        removed = REMOVED.get((table, path[-1]))
        if removed:
            return self._finding(Level.WARNING, path, f"was removed from Kata: {removed}", Verdict.REMOVED)
        near = EXPECTED.get(path[-1]) or nearest(table, path[-1])
        hint = f" (did you mean {near}?)" if near else ""
        what = "table" if isinstance(value, dict) else "key"
        return self._finding(Level.WARNING, path, f"is not a known {what}{hint}", Verdict.UNKNOWN)

    def _unread(self, path: tuple[str, ...], value: Any) -> Finding:
        """The finding about a table, or a key outside of the tables, that is not read."""
        if path[0] == "hypervisor" and path[-1] in (*OTHER_VMMS, "qemu", REMOTE):
            text = f"sandboxes of this file run on {self.hypervisor}"
            return self._finding(Level.NOTE, path, text, Verdict.NO_EFFECT, differs=False)
        if path[0] in REMOVED_TABLES:
            text = f"was removed from Kata: {REMOVED_TABLES[path[0]]}"
            return self._finding(Level.WARNING, path, text, Verdict.REMOVED)
        what = "table" if isinstance(value, dict | list) else "key"
        known = _TOP_LEVEL_TABLES if len(path) == 1 else (self.hypervisor,)
        near = difflib.get_close_matches(path[-1], known, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        return self._finding(Level.WARNING, path, f"is not a known {what}{hint}", Verdict.UNKNOWN)

    def _finding(
        self, level: Level, path: tuple[str, ...], text: str, verdict: Verdict | None = None, *, differs: bool = True
    ) -> Finding:
        return Finding(level, ".".join(path), text, verdict, self._source.lines.get(path), differs)


def _located(setting: Setting, source: Source) -> Setting:
    """`setting` with an absolute path: one that starts with a dot is relative to the file's directory.

    An empty path of a program but QEMU is replaced by the first of PROGRAM_PATHS that exists.
    """
    if setting.key.kind is not PATH:
        return setting
    if setting.value.startswith("."):
        return setting._replace(value=os.path.normpath(os.path.join(source.directory, setting.value)))
    if not setting.value and setting.key.name in PROGRAM_PATHS and setting.key.name != "path":
        return _first_present(setting, PROGRAM_PATHS[setting.key.name])
    return setting


def _first_present(setting: Setting, paths: tuple[str, ...]) -> Setting:
    return setting._replace(value=next((path for path in paths if os.access(path, os.X_OK)), paths[0]))


def contradictions(settings: Mapping[tuple[Table, str], Setting], hypervisor: str) -> Iterator[Finding]:
    """Errors about values that are valid by themselves but exclude each other. Source: Kata's checks."""

    def get(table: Table, name: str) -> Setting:
        return settings[table, name]

    def finding(setting: Setting, text: str) -> Finding:
        dotted = f"{document_table(setting.key.table, hypervisor)}.{setting.key.name}"
        return Finding(Level.ERROR, dotted, text, place=setting.place)

    if hypervisor == REMOTE:
        for (table, name), (value, why) in FIXED_VALUES.items():
            setting = get(table, name)
            if setting.value != value:
                yield finding(setting, f"{toml_value(setting.value)}: {why}: only {toml_value(value)}")
    features = get(Table.RUNTIME, "experimental")
    for name in features.value:
        if name != FORCE_GUEST_PULL:
            yield finding(features, f"{name[:100]!r} is not a known feature, only {FORCE_GUEST_PULL}")
    cold, hot = get(Table.HYPERVISOR, "cold_plug_vfio"), get(Table.HYPERVISOR, "hot_plug_vfio")
    if cold.value != "no-port" and hot.value != "no-port":
        yield finding(hot, f'"{hot.value}" excludes cold_plug_vfio = "{cold.value}"')
    logical = get(Table.HYPERVISOR, "block_device_logical_sector_size")
    physical = get(Table.HYPERVISOR, "block_device_physical_sector_size")
    if physical.value and logical.value > physical.value:
        yield finding(logical, f"{logical.value} is above block_device_physical_sector_size = {physical.value}")
    aio = get(Table.HYPERVISOR, "block_device_aio")
    bypass = ("block_device_cache_set", "block_device_cache_direct")
    if hypervisor != REMOTE and aio.value == "native" and not all(get(Table.HYPERVISOR, name).value for name in bypass):
        yield finding(aio, f'"native" needs {bypass[0]} = true and {bypass[1]} = true')
    most_memory = get(Table.HYPERVISOR, "default_maxmemory")
    huge = hypervisor != REMOTE and get(Table.HYPERVISOR, "enable_hugepages").value
    if huge and 0 < most_memory.value < HUGEPAGE_MIB:
        yield finding(most_memory, f"{most_memory.value} MiB is less than a huge page, {HUGEPAGE_MIB} MiB")
    netns, model = get(Table.RUNTIME, "disable_new_netns"), get(Table.RUNTIME, "internetworking_model")
    if netns.value and model.value != "none":
        yield finding(netns, f'true needs internetworking_model = "none", not "{model.value}"')
