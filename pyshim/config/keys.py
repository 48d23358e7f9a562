"""The description of a configuration key: its table, its values, its default and its effect.

The keys are listed by subject in `keys_*.py`; `catalogue.py` joins the lists.
"""

from enum import StrEnum
from typing import Any

import msgspec

from pyshim.config.values import Kind

ANNOTATION_PREFIX = "io.katacontainers."


class Table(StrEnum):
    """The tables of a file. HYPERVISOR is the table of the chosen hypervisor, such as `hypervisor.qemu`."""

    HYPERVISOR = "hypervisor"
    AGENT = "agent.kata"
    MEM_AGENT = "agent.kata.mem_agent"
    RUNTIME = "runtime"
    FACTORY = "factory"


class Verdict(StrEnum):
    """What a key does here."""

    HONOURED = "honoured"
    NO_EFFECT = "no effect"
    REFUSED = "refused"
    """Only the default is accepted. No sandbox starts with another value, which asks for safety or devices that pyshim
    does not offer."""
    REMOVED = "removed"
    UNKNOWN = "unknown"


class Dialect(StrEnum):
    """The program whose files have a key. KATA: both runtimes of Kata."""

    KATA = "Kata"
    RUST = "Kata's Rust runtime"
    OWN = "pyshim"


class Alias(msgspec.Struct, frozen=True, kw_only=True):
    """Another spelling of a key: in another table, under another name, or in another unit (`kind`)."""

    name: str
    table: Table
    kind: Kind
    is_former: bool = False
    """The key's name in earlier releases of pyshim: each use is a warning."""


class Key(msgspec.Struct, frozen=True, kw_only=True):
    table: Table
    name: str
    kind: Kind
    default: Any
    meaning: str
    verdict: Verdict
    why: str
    """Why it has no effect or is refused; empty for an honoured key."""
    field: str
    """The field's name in the table's struct of `model/config.py`; empty for a key that only this room reads."""
    dialect: Dialect
    aliases: tuple[Alias, ...]
    annotations: tuple[str, ...]
    """The full names of the annotations that override it."""
    blank: str | int | None = None
    """The value that means the default in a file: Kata's Go runtime cannot tell it from an absent key."""

    @property
    def dotted(self) -> str:
        return f"{document_table(self.table)}.{self.name}"

    @property
    def spellings(self) -> "tuple[Key | Alias, ...]":
        """The key itself, then its aliases."""
        return (self, *self.aliases)

    def is_blank(self, value: Any) -> bool:
        """`value` means the default."""
        return self.blank is not None and value == self.blank and not isinstance(value, bool)

    def verdict_of(self, value: Any) -> Verdict:
        """The key's effect with `value`. A refused key accepts its default; a key with an effect refuses its kind's
        `refused`.
        """
        if self._refuses(value):
            return Verdict.REFUSED
        if self.verdict is Verdict.REFUSED and value == self.default:
            return Verdict.HONOURED
        return self.verdict

    def why_of(self, value: Any) -> str:
        """The reason for `verdict_of(value)`."""
        return NOT_SUPPORTED if self._refuses(value) else self.why

    def _refuses(self, value: Any) -> bool:
        return value in self.kind.refused and self.verdict is not Verdict.NO_EFFECT

    def kind_under(self, annotation: str) -> Kind:
        """The kind of the annotation's value: that of the alias whose name the annotation has, else the key's."""
        name = annotation.rpartition(".")[2]
        return next((alias.kind for alias in self.aliases if alias.name == name), self.kind)


NOT_YET = "not implemented yet"
NOT_SUPPORTED = "not supported"
_ANNOTATION_GROUP = {Table.HYPERVISOR: "hypervisor", Table.AGENT: "agent", Table.RUNTIME: "runtime"}


def document_table(table: Table, hypervisor: str = "qemu") -> str:
    """The name of `table` in a file; `hypervisor` is the chosen hypervisor."""
    return f"hypervisor.{hypervisor}" if table is Table.HYPERVISOR else str(table)


class Rows(msgspec.Struct, frozen=True, kw_only=True):
    """Makes the keys of one table. Its methods take name, kind, default and meaning, and as `more`:

    - `own`: the key is pyshim's, not Kata's;
    - `ann`: the annotation of the key's name overrides it; `also`: further annotations, without ANNOTATION_PREFIX;
    - `aliases`: its other spellings, each a name in the same table or a name, table and kind;
    - `former`: its name and kind in earlier releases of pyshim;
    - `blank`: see `Key.blank`;
    - `field`: see `Key.field`; by default the name with the kind's suffix for a key of `used`, else empty.
    """

    table: Table
    dialect: Dialect = Dialect.KATA

    def used(self, name: str, kind: Kind, default: Any, meaning: str, *, field: str | None = None, **more: Any) -> Key:
        """An honoured key."""
        field = name + kind.suffix if field is None else field
        return self._key(name, kind, default, meaning, Verdict.HONOURED, "", field=field, **more)

    def later(self, name: str, kind: Kind, default: Any, meaning: str, why: str = "", **more: Any) -> Key:
        """A key without effect yet, which only costs speed or convenience."""
        why = f"{NOT_YET}: {why}" if why else NOT_YET
        return self._key(name, kind, default, meaning, Verdict.NO_EFFECT, why, **more)

    def refused(self, name: str, kind: Kind, default: Any, meaning: str, **more: Any) -> Key:
        """A refused key: it asks for safety or devices that pyshim does not offer yet."""
        return self._key(name, kind, default, meaning, Verdict.REFUSED, NOT_YET, **more)

    def never(self, name: str, kind: Kind, default: Any, meaning: str, why: str, **more: Any) -> Key:
        """A key that will never have an effect with this shim and its hypervisors."""
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
        ann: bool = False,
        also: tuple[str, ...] = (),
        aliases: tuple[tuple[str, Table, Kind] | str, ...] = (),
        former: tuple[str, Kind] | None = None,
        blank: str | int | None = None,
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
            dialect=Dialect.OWN if own else self.dialect,
            aliases=tuple(self._alias(alias, kind) for alias in aliases) + self._former(former),
            blank=blank,
            annotations=tuple(ANNOTATION_PREFIX + full for full in names),
        )

    def _former(self, former: tuple[str, Kind] | None) -> tuple[Alias, ...]:
        return () if former is None else (Alias(name=former[0], table=self.table, kind=former[1], is_former=True),)

    def _alias(self, alias: tuple[str, Table, Kind] | str, kind: Kind) -> Alias:
        if isinstance(alias, str):
            return Alias(name=alias, table=self.table, kind=kind)
        return Alias(name=alias[0], table=alias[1], kind=alias[2])
