"""Specs as files, read within bounds."""

import json
import os
import stat
from typing import Any

from .errors import InvalidSpec, os_cause
from .parse import parse_spec
from .spec import Spec

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
