"""Which file is read, and what its drop-ins make of it.

Order: the runtime option ConfigPath (or config_body), KATA_CONF_FILE when it names one of the default paths, then the
first default path that exists. Drop-ins are `config.d/*.toml` beside the resolved file, in name order; tables merge,
arrays replace. Source: the file search of both Kata runtimes, with our own path first and our own shipped file last.
"""

import os
import stat
import tomllib
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from pyshim.config.positions import Path, key_lines
from pyshim.config.values import exact_number
from pyshim.model.decoding import check_toml_keys
from pyshim.model.errors import FailedPrecondition, InvalidArgument
from pyshim.model.task import RuntimeOptions

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


class Place(NamedTuple):
    """Where a key stands; `layer` is 0 for the main file and counts the drop-ins after it."""

    file: str
    line: int
    layer: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A parsed document, drop-ins merged; `path` names it in messages, relative paths start from `directory`."""

    path: str
    directory: str
    document: Mapping[str, Any]
    places: Mapping[Path, Place] = msgspec.field(default_factory=dict)
    """Of keys and tables, by their path in the document. A document that was never a text has none."""


def named_file(path: str | None) -> RuntimeOptions | None:
    """The options by which a caller names this file; None, and the search of `read_source`, without one."""
    return RuntimeOptions(config_path=os.path.abspath(path), config_body=b"") if path else None


def read_source(
    options: RuntimeOptions | None,
    environment: Mapping[str, str],
    default_paths: tuple[str, ...] | None = None,
    *,
    on_top: tuple[str, ...] = (),
) -> Source:
    """The configuration this sandbox uses; files `on_top` are read after all drop-ins.

    Raises InvalidArgument or FailedPrecondition naming the file.
    """
    files = source_files(options, environment, default_paths)
    if not files:
        assert options is not None, "without options a file is found"
        where = "the runtime option config_body"
        return _merged(where, "/", [(where, options.config_body)])
    return read_files((*files, *on_top))


def read_files(files: tuple[str, ...]) -> Source:
    """The configuration of the first file, as the others change it, in their order. Raises as `read_source`."""
    return _merged(files[0], os.path.dirname(files[0]), [(file, _read(file)) for file in files])


def source_files(
    options: RuntimeOptions | None, environment: Mapping[str, str], default_paths: tuple[str, ...] | None = None
) -> tuple[str, ...]:
    """The main file, links resolved, and its drop-ins; none for a configuration that is a text of the options.

    Raises InvalidArgument or FailedPrecondition naming the file.
    """
    if options is not None and not options.config_path and options.config_body:
        return ()
    path = os.path.realpath(_find(options, environment, default_paths or (*DEFAULT_PATHS, SHIPPED_PATH)))
    return (path, *_drop_ins(os.path.join(os.path.dirname(path), "config.d")))


def _merged(path: str, directory: str, layers: list[tuple[str, bytes]]) -> Source:
    document: dict[str, Any] = {}
    places: dict[Path, Place] = {}
    for layer, (file, data) in enumerate(layers):
        parsed, lines = _parse(data, file)
        _merge(document, parsed)
        places.update({key: Place(file=file, line=line, layer=layer) for key, line in lines.items()})
    return Source(path=path, directory=directory, document=document, places=places)


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
    """Floats become exact fractions of their decimal text, so that sizing never sees a rounded number."""
    try:
        text = data.decode("utf-8")
        check_toml_keys(text)
        return tomllib.loads(text, parse_float=exact_number), key_lines(text)
    except UnicodeDecodeError as exc:
        line = data.count(b"\n", 0, exc.start) + 1
        raise InvalidArgument(f"read configuration '{where}': not UTF-8 at byte {exc.start}, line {line}") from exc
    except (tomllib.TOMLDecodeError, ValueError, RecursionError) as exc:
        raise InvalidArgument(f"read configuration '{where}': {exc}") from exc


def _merge(base: dict[str, Any], over: Mapping[str, Any]) -> None:
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            _merge(base[key], value)
        else:
            base[key] = value
