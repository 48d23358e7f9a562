"""Reads a document (the value of a JSON or YAML text) strictly: finds unknown members, wrong types and bad values.

Every problem names its member, such as `devices[2].containerEdits.env[0]`. As the Go parser does, a number or boolean
is taken where a text is meant (`name: 0`), because YAML spells texts without quotes.
"""

import re
from collections.abc import Container, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from .errors import InvalidSpec
from .spec import Spec, json_name
from .validate import spec_problems

T = TypeVar("T")
_INT64, _UINT32 = 1 << 63, 1 << 32
_OF_32_BITS = re.compile(r"\.(fileMode|uid|gid|additionalGids\[\d+\])$")
"""Members that are unsigned numbers of 32 bits. All others are signed, of 64 bits."""


def parse_spec(document: object, where: str) -> Spec:
    """The spec in `document`, valid in form and content. Raises InvalidSpec with every problem found."""
    reader = _SpecReader()
    spec = reader.noun(Spec, document, "")
    # A problem of form would be one of content, too, and is listed once.
    problems = reader.problems or list(spec_problems(spec))
    if problems:
        raise InvalidSpec(where, tuple(problems))
    return spec


class _SpecReader:
    """Records a problem and continues with a stand-in of the right type."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def noun(self, kind: type[T], value: object, at: str) -> T:
        """The noun of this class of spec.py. Its fields say members and types; one without a default is required."""
        members = _members_of(kind)  # type: ignore[arg-type]
        found = self._members(value, at, members)
        given = {}
        for name, (each, its_kind) in members.items():
            where = f"{at}.{name}" if at else name
            if found.get(name) is not None:
                given[each.name] = self._value(its_kind, found[name], where)
            elif each.default is MISSING and each.default_factory is MISSING:
                if isinstance(value, dict):
                    self._say(where, "is missing")
                given[each.name] = () if get_origin(its_kind) is tuple else its_kind()
        return kind(**given)

    def _members(self, value: object, at: str, known: Container[str]) -> Mapping[str, Any]:
        if not isinstance(value, dict):
            self._say(at or "the document", "is missing" if value is None else "is not an object")
            return {}
        for name in value:
            if name not in known:
                self._say(f"{at}.{name}"[:200] if at else str(name)[:200], "is not known")
        return value

    def _value(self, kind: Any, value: object, at: str) -> Any:
        if isinstance(kind, UnionType):  # `X | None`
            kind = get_args(kind)[0]
        if is_dataclass(kind):
            return self.noun(kind, value, at)  # type: ignore[arg-type]
        if get_origin(kind) is tuple:
            return self._each(get_args(kind)[0], value, at)
        if get_origin(kind) is Mapping:
            return self._texts_by_name(value, at)
        return {str: self._text, bool: self._boolean, int: self._number}[kind](value, at)

    def _each(self, kind: Any, value: object, at: str) -> tuple[Any, ...]:
        if not isinstance(value, list):
            self._say(at, "is not a list")
            return ()
        return tuple(self._value(kind, item, f"{at}[{index}]") for index, item in enumerate(value))

    def _texts_by_name(self, value: object, at: str) -> dict[str, str]:
        if not isinstance(value, dict):
            self._say(at, "is not an object")
            return {}
        named = ((key, item, f"{at}[{str(key)[:100]!r}]") for key, item in value.items())
        return {self._text(key, at): self._text(item, at) for key, item, at in named}

    def _boolean(self, value: object, at: str) -> bool:
        if isinstance(value, bool):
            return value
        self._say(at, "is neither true nor false")
        return False

    def _number(self, value: object, at: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            self._say(at, "is not a whole number")
            return 0
        least, most = (0, _UINT32 - 1) if _OF_32_BITS.search(at) else (-_INT64, _INT64 - 1)
        if not least <= value <= most:
            self._say(at, f"is out of range: {value if abs(value) < 1 << 70 else 'a huge number'}")
            return 0
        return value

    def _text(self, value: object, at: str) -> str:
        if isinstance(value, bool):
            value = "true" if value else "false"
        elif isinstance(value, int) and abs(value) < 1 << 64:
            value = str(value)
        if not isinstance(value, str):
            self._say(at, "is not a text")
            return ""
        if "\0" in value or any("\ud800" <= char <= "\udfff" for char in value):
            self._say(at, f"is not a text that a kernel takes: {value[:100]!r}")
            return ""
        return value

    def _say(self, member: str, problem: str) -> None:
        self.problems.append(f"{member} {problem}")


@cache
def _members_of(kind: type) -> dict[str, tuple[Field[Any], Any]]:
    """By a member's name, its field and type."""
    types = get_type_hints(kind)
    return {json_name(each.name): (each, types[each.name]) for each in fields(kind)}
