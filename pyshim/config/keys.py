"""A key: its table, the values it may hold, its default, and its effect here.

The keys themselves are data, a file per subject (`keys_*.py`); `catalogue.py` puts them together.
"""

from enum import StrEnum
from typing import Any

import msgspec

from pyshim.config.values import Kind

ANNOTATION_PREFIX = "io.katacontainers."


class Table(StrEnum):
    """The tables of a file; HYPERVISOR stands for the one of the chosen hypervisor, `hypervisor.qemu`."""

    HYPERVISOR = "hypervisor"
    AGENT = "agent.kata"
    MEM_AGENT = "agent.kata.mem_agent"
    RUNTIME = "runtime"
    FACTORY = "factory"


class Verdict(StrEnum):
    HONOURED = "honoured"
    NO_EFFECT = "no effect"
    REFUSED = "refused"
    """The default is accepted; any other value would promise what is not there, so no sandbox starts with it."""
    REMOVED = "removed"
    UNKNOWN = "unknown"


class Dialect(StrEnum):
    KATA = "Kata"
    GO = "Kata's Go runtime"
    RUST = "Kata's Rust runtime"
    OWN = "pyshim"


class Alias(msgspec.Struct, frozen=True, kw_only=True):
    """Another place of the same key; `kind` when it is written there in another unit."""

    name: str
    table: Table
    kind: Kind


class Key(msgspec.Struct, frozen=True, kw_only=True):
    table: Table
    name: str
    kind: Kind
    default: Any
    meaning: str
    verdict: Verdict
    why: str
    """Why it has no effect, or is refused; empty when it is honoured."""
    field: str
    """Of the noun of its table in model/config.py; empty for a key that no other room reads."""
    dialect: Dialect
    aliases: tuple[Alias, ...]
    annotations: tuple[str, ...]
    """Full names of the pod annotations that override it."""

    @property
    def dotted(self) -> str:
        return f"{document_table(self.table)}.{self.name}"

    @property
    def spellings(self) -> "tuple[Key | Alias, ...]":
        """Where it may be written, its own place first."""
        return (self, *self.aliases)

    def verdict_of(self, value: Any) -> Verdict:
        """The key's effect with `value`. A refused key accepts its default; any key refuses its kind's `refused`."""
        if value in self.kind.refused:
            return Verdict.REFUSED
        if self.verdict is Verdict.REFUSED and value == self.default:
            return Verdict.HONOURED
        return self.verdict

    def why_of(self, value: Any) -> str:
        """The reason for `verdict_of(value)`."""
        return NOT_SUPPORTED if value in self.kind.refused else self.why

    def kind_under(self, annotation: str) -> Kind:
        """How the value is written in that annotation, which may have the name of an alias."""
        name = annotation.rpartition(".")[2]
        return next((alias.kind for alias in self.aliases if alias.name == name), self.kind)


NOT_YET = "not implemented yet"
NOT_SUPPORTED = "not supported"
_ANNOTATION_GROUP = {Table.HYPERVISOR: "hypervisor", Table.AGENT: "agent", Table.RUNTIME: "runtime"}


def document_table(table: Table, hypervisor: str = "qemu") -> str:
    """The table's name in a file whose sandboxes run on `hypervisor`."""
    return f"hypervisor.{hypervisor}" if table is Table.HYPERVISOR else str(table)


class Rows(msgspec.Struct, frozen=True, kw_only=True):
    """Makes the keys of one table; `dialect` is the one whose file has them unless a row says otherwise."""

    table: Table
    dialect: Dialect = Dialect.KATA

    def used(self, name: str, kind: Kind, default: Any, meaning: str, *, field: str | None = None, **more: Any) -> Key:
        """A key the code acts on."""
        field = name + kind.suffix if field is None else field
        return self._key(name, kind, default, meaning, Verdict.HONOURED, "", field=field, **more)

    def later(self, name: str, kind: Kind, default: Any, meaning: str, why: str = "", **more: Any) -> Key:
        """A key whose absence only costs speed or convenience, read but not acted on."""
        why = f"{NOT_YET}: {why}" if why else NOT_YET
        return self._key(name, kind, default, meaning, Verdict.NO_EFFECT, why, **more)

    def refused(self, name: str, kind: Kind, default: Any, meaning: str, **more: Any) -> Key:
        """A key that asks for safety or devices which a VM without them would silently lack."""
        return self._key(name, kind, default, meaning, Verdict.REFUSED, NOT_YET, **more)

    def never(self, name: str, kind: Kind, default: Any, meaning: str, why: str, **more: Any) -> Key:
        """A key that cannot decide anything with this shim and hypervisor."""
        return self._key(name, kind, default, meaning, Verdict.NO_EFFECT, why, **more)

    def _key(
        self,
        name: str,
        kind: Kind,
        default: Any,
        meaning: str,
        verdict: Verdict,
        why: str,
        *,
        field: str = "",
        own: bool = False,
        dialect: Dialect | None = None,
        ann: bool = False,
        also: tuple[str, ...] = (),
        aliases: tuple[tuple[str, Table, Kind] | str, ...] = (),
    ) -> Key:
        group = _ANNOTATION_GROUP.get(self.table, "")
        names = ((f"config.{group}.{name}",) if ann else ()) + also
        return Key(
            table=self.table,
            name=name,
            kind=kind,
            default=default,
            meaning=meaning,
            verdict=verdict,
            why=why,
            field=field,
            dialect=Dialect.OWN if own else dialect or self.dialect,
            aliases=tuple(self._alias(alias, kind) for alias in aliases),
            annotations=tuple(ANNOTATION_PREFIX + full for full in names),
        )

    def _alias(self, alias: tuple[str, Table, Kind] | str, kind: Kind) -> Alias:
        if isinstance(alias, str):
            return Alias(name=alias, table=self.table, kind=kind)
        return Alias(name=alias[0], table=alias[1], kind=alias[2])
