"""Specs as files, read within bounds and strictly: finds unknown members, wrong types and bad values.

Every problem names its member, such as `devices[2].containerEdits.env[0]`. As the Go parser does, a number or boolean
is taken where a text is meant (`name: 0`), because YAML spells texts without quotes.
"""

import json
import os
import re
import stat
from collections.abc import Container, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from .errors import InvalidSpec, os_cause
from .spec import Spec, json_name, spec_problems

SUFFIXES = (".json", ".yaml")
MAX_SPEC_BYTES = 4 * 1024 * 1024
_MAX_DEPTH = 32
MAX_VALUES = 200_000
"""Values in one document, each alias of YAML counted anew; ten times as many as a node full of divided GPUs has."""


def read_spec(path: str) -> Spec:
    """The spec in the file, JSON or YAML by content. Raises InvalidSpec naming the file and every problem."""
    return parse_spec(document_of(_content(path), path), path)


def _content(path: str) -> bytes:
    try:
        # The open of a fifo would wait for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise InvalidSpec(path, (f"open: {os_cause(error)}",)) from error
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise InvalidSpec(path, ("it is not a regular file",))
        if found.st_size > MAX_SPEC_BYTES:
            raise InvalidSpec(path, (f"it has {found.st_size} bytes, at most {MAX_SPEC_BYTES} are read",))
        try:
            content = file.read(MAX_SPEC_BYTES + 1)
        except OSError as error:
            raise InvalidSpec(path, (f"read: {os_cause(error)}",)) from error
    if len(content) > MAX_SPEC_BYTES:
        raise InvalidSpec(path, (f"it grew beyond {MAX_SPEC_BYTES} bytes while it was read",))
    return content


def document_of(content: bytes, where: str) -> object:
    """The value that JSON or YAML text spells. Raises InvalidSpec; a name given twice in one object is an error."""
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise InvalidSpec(where, (f"not UTF-8 at byte {error.start}",)) from error
    if text.lstrip()[:1] == "{":
        try:
            return _bounded(json.loads(text, object_pairs_hook=_object), where)
        except (ValueError, RecursionError) as error:
            if where.endswith(".json"):
                raise InvalidSpec(where, (f"not JSON: {error}",)) from error
    return _bounded(_yaml(text, where), where)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the name {name[:100]!r} is given twice in one object")
        found[name] = value
    return found


def _yaml(text: str, where: str) -> object:
    try:
        import yaml
    except ImportError as error:
        raise InvalidSpec(where, ("not JSON, and reading YAML needs PyYAML, which is not installed",)) from error

    from .yaml_text import load

    try:
        return load(text, max_values=MAX_VALUES)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InvalidSpec(where, (f"not YAML: {reason}",)) from error


def _bounded(document: object, where: str) -> object:
    """`document`. Raises InvalidSpec for one deeper or larger than a spec can be: a small text with YAML aliases can
    spell billions of values."""
    left = MAX_VALUES
    pending = [(document, 0)]
    while pending:
        value, depth = pending.pop()
        left -= 1
        if depth > _MAX_DEPTH or left < 0:
            problem = f"nested deeper than {_MAX_DEPTH}" if left >= 0 else f"more than {MAX_VALUES} values"
            raise InvalidSpec(where, (problem,))
        if isinstance(value, dict):
            pending.extend((item, depth + 1) for item in value.values())
        elif isinstance(value, list):
            pending.extend((item, depth + 1) for item in value)
    return document


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
