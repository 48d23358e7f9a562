"""Finds and parses the configuration file of a sandbox, and merges its drop-ins.

The first of these is read: the runtime option ConfigPath (or config_body), KATA_CONF_FILE if it names a default path,
the first default path that exists. Then `config.d/*.toml` beside the file, links resolved, in the order of their names:
tables merge, other values replace. Source: the search of both Kata runtimes, with pyshim's own path first and the
shipped file last.

Also finds the line of each key and table, which `tomllib` does not report: a table header, or a key with its value, is
a valid TOML text, so the text is parsed again, statement by statement.
"""

import os
import stat
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from pyshim.config.values import exact_number
from pyshim.model.decoding import damaged, toml_value
from pyshim.model.errors import FailedPrecondition, InvalidArgument
from pyshim.model.task import RuntimeOptions

Path = tuple[str, ...]
_ENDS = ("]", '"""', "'''")
"""A line without any of these cannot be the last of a value of several lines."""
_MAX_FAILURES = 100
"""The most failed attempts to parse a statement. Each attempt parses all lines of the statement so far."""


def key_lines(text: str) -> dict[Path, int]:
    """The line number, from 1, of every key and table of a valid TOML text.

    All items of an array of tables have the array's path. After `_MAX_FAILURES` the remaining keys are left out.
    """
    lines: dict[Path, int] = {}
    table: Path = ()
    for line, is_header, document in _statements(text):
        above = () if is_header else table
        for path in _paths(document, above):
            lines.setdefault(path, line)
            table = path if is_header else table
    return lines


def _statements(text: str) -> Iterator[tuple[int, bool, Mapping[str, Any]]]:
    """For each statement: its first line, whether it is a table header, and the document that it describes."""
    statement, first, failures = "", 0, 0
    for number, line in enumerate(text.split("\n"), start=1):
        first = first or number
        statement += f"{line}\n"
        if number != first and not any(end in line for end in _ENDS):
            continue
        try:
            document = tomllib.loads(statement)
        except tomllib.TOMLDecodeError:
            failures += 1
            if failures > _MAX_FAILURES:
                return
            continue
        if document:
            yield first, statement.lstrip().startswith("["), document
        statement, first = "", 0


def _paths(document: Mapping[str, Any], above: Path) -> Iterator[Path]:
    for name, value in document.items():
        path = (*above, name)
        yield path
        if isinstance(value, dict):
            yield from _paths(value, path)


DEFAULT_PATHS = (
    "/etc/pyshim/configuration.toml",
    "/etc/kata-containers/configuration.toml",
    "/etc/kata-containers/runtime-rs/configuration.toml",
    "/usr/share/defaults/kata-containers/configuration.toml",
    "/usr/share/defaults/kata-containers/runtime-rs/configuration.toml",
    "/opt/kata/share/defaults/kata-containers/configuration.toml",
    "/opt/kata/share/defaults/kata-containers/runtime-rs/configuration.toml",
)
SHIPPED_PATH = os.path.join(os.path.dirname(__file__), "..", "..", "configs", "configuration-qemu.toml")
MAX_CONFIG_BYTES = 1024 * 1024


class SourceLine(NamedTuple):
    """The line of a key in a file."""

    file: str
    line: int
    layer: int
    """0: the main file; 1 and above: the drop-ins, in order."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed document with its drop-ins merged."""

    path: str
    """Its name in messages."""
    directory: str
    """Relative paths in the document start from it."""
    document: Mapping[str, Any]
    lines: Mapping[Path, SourceLine] = msgspec.field(default_factory=dict)
    """Where each key and table is written, by its path in the document; empty for a document that was not parsed."""


def named_file(path: str | None) -> RuntimeOptions | None:
    """Runtime options that name the file `path`; None without a path: `read_source` then searches for the file."""
    return RuntimeOptions(config_path=os.path.abspath(path), config_body=b"") if path else None


def read_source(
    options: RuntimeOptions | None,
    environment: Mapping[str, str],
    default_paths: tuple[str, ...] | None = None,
    *,
    on_top: tuple[str, ...] = (),
) -> Source:
    """The document of the file that is found, of its drop-ins, and of the files `on_top`, in this order.

    Raises InvalidArgument or FailedPrecondition naming the file.
    """
    files = source_files(options, environment, default_paths)
    if not files:
        assert options is not None, "without options a file is found"
        where = "the runtime option config_body"
        return _merged(where, "/", [(where, options.config_body)])
    return read_files((*files, *on_top))


def read_files(files: tuple[str, ...]) -> Source:
    """The document of the first file, into which the others are merged in their order. Raises as `read_source`."""
    return _merged(files[0], os.path.dirname(files[0]), [(file, _read(file)) for file in files])


def source_files(
    options: RuntimeOptions | None, environment: Mapping[str, str], default_paths: tuple[str, ...] | None = None
) -> tuple[str, ...]:
    """The paths of the main file, links resolved, and of its drop-ins; empty if the options hold the text itself.

    Raises InvalidArgument or FailedPrecondition naming the file.
    """
    if options is not None and not options.config_path and options.config_body:
        return ()
    path = os.path.realpath(_find(options, environment, default_paths or (*DEFAULT_PATHS, SHIPPED_PATH)))
    return (path, *_drop_ins(os.path.join(os.path.dirname(path), "config.d")))


def _merged(path: str, directory: str, layers: list[tuple[str, bytes]]) -> Source:
    document: dict[str, Any] = {}
    merged: dict[Path, SourceLine] = {}
    for layer, (file, data) in enumerate(layers):
        parsed, lines = _parse(data, file)
        _merge(document, parsed)
        merged.update({key: SourceLine(file=file, line=line, layer=layer) for key, line in lines.items()})
    return Source(path=path, directory=directory, document=document, lines=merged)


def _find(options: RuntimeOptions | None, environment: Mapping[str, str], default_paths: tuple[str, ...]) -> str:
    if options is not None and options.config_path:
        return options.config_path
    from_environment = environment.get("KATA_CONF_FILE", "")
    if from_environment:
        if os.path.realpath(from_environment) not in {os.path.realpath(path) for path in default_paths}:
            raise InvalidArgument(
                f"read configuration: KATA_CONF_FILE '{from_environment}' is not one of the default paths"
            )
        return from_environment
    for path in default_paths:
        if os.path.exists(path):
            return path
    raise FailedPrecondition(f"find configuration: none of {', '.join(default_paths)} exists")


def _drop_ins(directory: str) -> list[str]:
    try:
        names = sorted(name for name in os.listdir(directory) if name.endswith(".toml"))
    except FileNotFoundError:
        return []
    except OSError as exc:
        raise FailedPrecondition(f"read drop-ins '{directory}': {exc.strerror}") from exc
    return [os.path.join(directory, name) for name in names]


def _read(path: str) -> bytes:
    try:
        # Without O_NONBLOCK the open of a FIFO would wait for a writer that never comes.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            mode = os.fstat(fd).st_mode
            if not stat.S_ISREG(mode):
                kind = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
                raise FailedPrecondition(f"read configuration '{path}': it is {kind}")
            with open(fd, "rb", closefd=False) as file:
                data = file.read(MAX_CONFIG_BYTES + 1)
        finally:
            os.close(fd)
    except OSError as exc:
        raise FailedPrecondition(f"read configuration '{path}': {exc.strerror}") from exc
    if len(data) > MAX_CONFIG_BYTES:
        raise InvalidArgument(f"read configuration '{path}': larger than {MAX_CONFIG_BYTES} bytes")
    return data


def _parse(data: bytes, where: str) -> tuple[dict[str, Any], dict[Path, int]]:
    """The document and the lines of its keys. Floats are fractions, so that sizing computes with exact numbers."""
    refused = damaged(f"configuration '{where}'")
    return toml_value(data, refused, parse_float=exact_number), key_lines(data.decode())


def _merge(base: dict[str, Any], over: Mapping[str, Any]) -> None:
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            _merge(base[key], value)
        else:
            base[key] = value
