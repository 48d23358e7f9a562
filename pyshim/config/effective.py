"""The result of a document: a value and its origin for every key, and a finding for everything that was written.

Never stops at the first mistake: `pyshim config check` shows them all, a sandbox's start raises the first.
"""

import difflib
import os
from collections.abc import Iterator, Mapping
from enum import IntEnum
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from pyshim.config.catalogue import nearest, spellings
from pyshim.config.keys import Alias, Key, Table, Verdict, document_table
from pyshim.config.keys_runtime import REMOVED, REMOVED_TABLES
from pyshim.config.remote import FIXED_VALUES, keys_of
from pyshim.config.remote import NAME as REMOTE
from pyshim.config.sources import Place, Source
from pyshim.config.values import PATH, toml_value

KNOWN_PLACES: Mapping[str, tuple[str, ...]] = {
    "path": ("/usr/bin/qemu-system-x86_64", "/opt/kata/bin/qemu-system-x86_64", "/usr/libexec/qemu-kvm"),
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
"""Where a program is looked for when its key is empty: Debian's, Fedora's and kata-deploy's places."""
FORCE_GUEST_PULL = "force_guest_pull"
"""The one feature that `experimental` may name."""
OTHER_VMMS = frozenset({"clh", "cloud-hypervisor", "dragonball", "firecracker", "openvmm", "stratovirt"})
_TOP = ("hypervisor", "agent", "runtime", "factory")


class Level(IntEnum):
    FINE = 0
    NOTE = 1
    WARNING = 2
    ERROR = 3


class Finding(NamedTuple):
    level: Level
    subject: str
    """Dotted key or table as it was written."""
    text: str
    verdict: Verdict | None = None
    """None for what is wrong in itself: an error."""
    place: Place | None = None
    decisive: bool = True
    """The value is not the default: without effect, something is lost."""


class Setting(NamedTuple):
    key: Key
    value: Any
    place: Place | None
    annotation: str
    """The annotation it comes from; empty for a value of a file, or the default."""
    is_default: bool
    """Neither a file nor an annotation sets it."""

    @property
    def verdict(self) -> Verdict:
        return self.key.verdict_of(self.value)

    @property
    def origin(self) -> str:
        if self.annotation:
            return f"annotation {self.annotation}"
        return "default" if self.is_default else str(self.place) if self.place else "file"


class Effective(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    source: Source
    hypervisor: str
    settings: Mapping[tuple[Table, str], Setting]
    findings: tuple[Finding, ...]

    def of(self, table: Table, name: str) -> Setting:
        return self.settings[table, name]

    def dotted(self, key: Key) -> str:
        return f"{document_table(key.table, self.hypervisor)}.{key.name}"

    def with_settings(self, changed: Mapping[tuple[Table, str], Setting]) -> "Effective":
        return replace(self, settings={**self.settings, **changed})

    def errors(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.level is Level.ERROR)


def examine(source: Source, hypervisor_name: str = "") -> Effective:
    """Every key of `source` judged, `hypervisor_name` overriding the file's own choice."""
    reader = _Reader(source, hypervisor_name)
    settings = {(key.table, key.name): reader.setting(key) for key in keys_of(reader.hypervisor)}
    settings |= derived(settings)
    findings = [*reader.findings, *reader.unknown(), *contradictions(settings, reader.hypervisor)]
    return Effective(
        source=source,
        hypervisor=reader.hypervisor,
        settings=settings,
        findings=tuple(sorted(findings, key=_reading_order)),
    )


def derived(settings: Mapping[tuple[Table, str], Setting]) -> Mapping[tuple[Table, str], Setting]:
    """Settings that follow from others: both are what a file of Kata's Rust runtime means.

    - Policy `overhead` for a file that names overheads and no policy.
    - experimental_force_guest_pull, where experimental names it.
    """
    changed: dict[tuple[Table, str], Setting] = {}
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


def _reading_order(finding: Finding) -> tuple[int, int]:
    return (finding.place.layer, finding.place.line) if finding.place else (-1, 0)


class _Written(NamedTuple):
    """One spelling of a key, present in the document."""

    alias: Key | Alias
    path: tuple[str, ...]
    raw: Any
    place: Place | None


class _Reader:
    def __init__(self, source: Source, hypervisor_name: str) -> None:
        self._source = source
        self._broken: set[tuple[str, ...]] = set()
        self.findings: list[Finding] = []
        self.hypervisor = hypervisor_name or self._chosen()
        self._standing = tuple((table, path, self._table(path)) for table, path in self._tables())
        self._present: dict[tuple[Table, str], list[tuple[tuple[str, ...], Any]]] = {}
        """By table and name, where such a key stands and its value."""
        for table, path, values in self._standing:
            for name, value in values.items():
                self._present.setdefault((table, name), []).append(((*path, name), value))

    def _chosen(self) -> str:
        """runtime.hypervisor_name as the Rust runtime reads it; else the table that is there, as the Go one does."""
        named = self._table(("runtime",)).get("hypervisor_name")
        if isinstance(named, str) and named:
            return named
        present = [name for name, table in self._table(("hypervisor",)).items() if isinstance(table, dict)]
        return "qemu" if "qemu" in present or not present else present[0]

    def setting(self, key: Key) -> Setting:
        """The key's value, located if it is a path; the default when it is absent, or wrong (which is a finding)."""
        written = self._written(key)
        if not written:
            return self._located(Setting(key=key, value=key.default, place=None, annotation="", is_default=True))
        results: list[tuple[_Written, Any]] = []
        for one in written:
            try:
                results.append((one, one.alias.kind.convert(one.raw)))
            except ValueError as exc:
                self.findings.append(self._finding(Level.ERROR, one.path, str(exc)))
        if not results:
            return self._located(Setting(key=key, value=key.default, place=None, annotation="", is_default=True))
        last, value = max(results, key=lambda result: result[0].place.layer if result[0].place else 0)
        for one, other in results:
            if other != value and (not one.place or not last.place or one.place.layer == last.place.layer):
                text = f"contradicts {'.'.join(last.path)}, which is the same key"
                self.findings.append(self._finding(Level.ERROR, one.path, text))
        for one, other in results:
            verdict = key.verdict_of(other)
            level = Level.FINE if verdict is Verdict.HONOURED else Level.NOTE
            decisive = other != key.default
            self.findings.append(self._finding(level, one.path, key.why_of(other), verdict, decisive=decisive))
        return self._located(Setting(key=key, value=value, place=last.place, annotation="", is_default=False))

    def unknown(self) -> Iterator[Finding]:
        """Findings for names in the document that are not keys."""
        for name, value in self._source.document.items():
            if name not in _TOP:
                yield self._stranger((name,), value)
        known_tables = {path for _, path, _ in self._standing}
        for table, path, values in self._standing:
            for name, value in values.items():
                if (table, name) in spellings() or (*path, name) in known_tables:
                    continue
                yield self._unknown_key(table, (*path, name), value)
        for group in ("hypervisor", "agent"):
            for name, value in self._table((group,)).items():
                if (group, name) not in {("hypervisor", self.hypervisor), ("agent", "kata")}:
                    yield self._stranger((group, name), value)

    def _written(self, key: Key) -> list[_Written]:
        return [
            _Written(alias, path, value, self._source.places.get(path))
            for alias in key.spellings
            for path, value in self._present.get((alias.table, alias.name), ())
        ]

    def _tables(self) -> tuple[tuple[Table, tuple[str, ...]], ...]:
        """Where each table's keys stand; the Rust runtime has the factory inside the hypervisor's table."""
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
                if path[:depth] not in self._broken:
                    self._broken.add(path[:depth])
                    self.findings.append(self._finding(Level.ERROR, path[:depth], "is not a table"))
                return {}
            table = inner
        return table

    def _unknown_key(self, table: Table, path: tuple[str, ...], value: Any) -> Finding:
        removed = REMOVED.get((table, path[-1]))
        if removed:
            return self._finding(Level.WARNING, path, f"was removed from Kata: {removed}", Verdict.REMOVED)
        near = nearest(table, path[-1])
        hint = f" (did you mean {near}?)" if near else ""
        what = "table" if isinstance(value, dict) else "key"
        return self._finding(Level.WARNING, path, f"is not a known {what}{hint}", Verdict.UNKNOWN)

    def _stranger(self, path: tuple[str, ...], value: Any) -> Finding:
        """The finding about a table that is not read."""
        if path[0] == "hypervisor" and path[-1] in OTHER_VMMS | {"qemu", REMOTE}:
            text = f"sandboxes of this file run on {self.hypervisor}"
            return self._finding(Level.NOTE, path, text, Verdict.NO_EFFECT, decisive=False)
        if path[0] in REMOVED_TABLES:
            text = f"was removed from Kata: {REMOVED_TABLES[path[0]]}"
            return self._finding(Level.WARNING, path, text, Verdict.REMOVED)
        what = "table" if isinstance(value, dict | list) else "key"
        near = difflib.get_close_matches(path[-1], _TOP if len(path) == 1 else (self.hypervisor,), n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        return self._finding(Level.WARNING, path, f"is not a known {what}{hint}", Verdict.UNKNOWN)

    def _finding(
        self, level: Level, path: tuple[str, ...], text: str, verdict: Verdict | None = None, *, decisive: bool = True
    ) -> Finding:
        return Finding(level, ".".join(path), text, verdict, self._source.places.get(path), decisive)

    def _located(self, setting: Setting) -> Setting:
        """A path that starts with a dot is relative to the file, an empty program is looked for."""
        if setting.key.kind is not PATH:
            return setting
        if setting.value.startswith("."):
            return setting._replace(value=os.path.normpath(os.path.join(self._source.directory, setting.value)))
        if not setting.value and setting.key.name in KNOWN_PLACES:
            places = KNOWN_PLACES[setting.key.name]
            return setting._replace(value=next((path for path in places if os.access(path, os.X_OK)), places[0]))
        return setting


def contradictions(settings: Mapping[tuple[Table, str], Setting], hypervisor: str) -> Iterator[Finding]:
    """Pairs of values that exclude each other. Source: Kata's own checks of a configuration."""

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
    netns, model = get(Table.RUNTIME, "disable_new_netns"), get(Table.RUNTIME, "internetworking_model")
    if netns.value and model.value != "none":
        yield finding(netns, f'true needs internetworking_model = "none", not "{model.value}"')
