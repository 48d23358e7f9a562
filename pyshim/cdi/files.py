"""Specs as files: read within bounds, written whole or not at all."""

import contextlib
import errno
import json
import os
import stat
import tempfile
from collections.abc import Callable
from typing import Any

from pyshim.cdi.errors import CdiError, InvalidName, InvalidSpec
from pyshim.cdi.names import check_device, check_kind
from pyshim.cdi.parse import parse_spec
from pyshim.cdi.spec import Spec, as_json

SUFFIXES = (".json", ".yaml")
MAX_SPEC_BYTES = 4 * 1024 * 1024
_MAX_DEPTH = 32
MAX_VALUES = 200_000
"""Values in one document, counted where YAML's aliases repeat them; ten times what a node full of divided GPUs has."""


def read_spec(path: str, *, max_bytes: int = MAX_SPEC_BYTES) -> Spec:
    """The spec in the file, JSON or YAML by content. Raises InvalidSpec naming the file and every problem."""
    return parse_spec(document_of(_content(path, max_bytes), path), path)


def _content(path: str, max_bytes: int) -> bytes:
    try:
        # The open of a fifo would wait for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise InvalidSpec(path, (f"open: {_cause(error)}",)) from error
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise InvalidSpec(path, ("it is not a regular file",))
        if found.st_size > max_bytes:
            raise InvalidSpec(path, (f"it has {found.st_size} bytes, at most {max_bytes} are read",))
        try:
            content = file.read(max_bytes + 1)
        except OSError as error:
            raise InvalidSpec(path, (f"read: {_cause(error)}",)) from error
    if len(content) > max_bytes:
        raise InvalidSpec(path, (f"it grew beyond {max_bytes} bytes while it was read",))
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

    from pyshim.cdi.yaml_text import load

    try:
        return load(text, max_values=MAX_VALUES)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InvalidSpec(where, (f"not YAML: {reason}",)) from error


def _bounded(document: object, where: str) -> object:
    """`document`, if it is no deeper or larger than a spec can be: a small text with YAML aliases can spell billions of
    values."""
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


def spec_file_name(kind: str, transient_id: str = "", suffix: str = ".json") -> str:
    """`vendor-class.json`, or `vendor-class_<id>.json` for a spec that lives as long as something else does.

    A `/` of the id becomes `_`. Raises InvalidName.
    """
    if problem := check_kind(kind):
        raise InvalidName(f"name cdi spec of kind {kind[:100]!r}: the kind {problem}")
    if suffix not in SUFFIXES:
        raise InvalidName(f"name cdi spec of kind {kind!r}: suffix {suffix!r} is not one of {', '.join(SUFFIXES)}")
    owner = transient_id.replace("/", "_")
    if owner and check_device(owner):
        raise InvalidName(f"name cdi spec of kind {kind!r}: id {transient_id[:100]!r} {check_device(owner)}")
    return f"{kind.replace('/', '-')}{'_' if owner else ''}{owner}{suffix}"


def write_spec(spec: Spec, directory: str, *, transient_id: str = "", suffix: str = ".json") -> str:
    """The path of the file that now holds `spec`; a reader sees the old file or the new one, never a part.

    The directory is made if need be. Raises InvalidSpec, InvalidName or CdiError.
    """
    path = os.path.join(directory, spec_file_name(spec.kind, transient_id, suffix))
    parse_spec(as_json(spec), path)
    text = _text(as_json(spec), suffix)
    try:
        os.makedirs(directory, mode=0o755, exist_ok=True)
        # Readers skip it: its name begins with a dot and has no suffix.
        fd, temporary = tempfile.mkstemp(prefix=".", dir=directory)
        try:
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fchmod(fd, 0o644)
                os.fsync(fd)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        raise CdiError(f"write cdi spec '{path}': {_cause(error)}") from error
    return path


def _text(document: object, suffix: str) -> str:
    if suffix == ".json":
        return json.dumps(document, indent=2) + "\n"
    import yaml

    dump: Callable[..., str] = yaml.safe_dump
    return dump(document, sort_keys=False)


def remove_spec(kind: str, directory: str, *, transient_id: str = "", suffix: str = ".json") -> None:
    """The file that `write_spec` made is gone. Idempotent."""
    path = os.path.join(directory, spec_file_name(kind, transient_id, suffix))
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    except OSError as error:
        raise CdiError(f"remove cdi spec '{path}': {_cause(error)}") from error


def _cause(error: OSError) -> str:
    number = errno.errorcode.get(error.errno or 0, str(error.errno))
    return f"{number} ({(error.strerror or '').lower()})"
