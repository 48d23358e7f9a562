"""Reads containerd's configuration: its files with their imports, the CRI plugin's runtimes and snapshotter."""

import os
import posixpath
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pyshim.model.decoding import toml_value
from pyshim.model.errors import FailedPrecondition

_CRI_1, _CRI_2 = "io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"
CRI_PLUGINS = {2: _CRI_1, 3: _CRI_2, 4: _CRI_2}
"""The plugin whose table has the runtimes, by version of the configuration."""
_IMAGE_PLUGIN = "io.containerd.cri.v1.images"
_GO_TOKEN = re.compile(r"\[\^?(?:\\.|[^\]\\])+\]|\\.|[^\\\[]", re.DOTALL)
"""A class, an escaped character, or a character of a pattern of Go's filepath.Match."""
_MAX_FILES = 100
"""The most files that are read of one configuration, whose imports may be patterns."""


def config_versions(containerd: tuple[int, int]) -> tuple[int, ...]:
    """The configuration versions that this containerd reads and that have runtime types.

    Source: `ConfigVersion` in containerd's version/version.go.
    """
    newest = 4 if containerd >= (2, 3) else 3 if containerd >= (2, 0) else 2
    return tuple(range(2, newest + 1))


def rewrite_hint(containerd: tuple[int, int], version: int) -> str:
    """The command that prints a configuration which this containerd reads, in place of one of `version`."""
    has_migrate = containerd >= (2, 0)
    return f"containerd config {'migrate' if has_migrate and version < 3 else 'default'}"


def parsed(content: str, path: str) -> dict[str, Any]:
    """Raises FailedPrecondition with the place where it is not TOML."""
    return toml_value(content.removeprefix("\ufeff"), lambda problem: FailedPrecondition(f"parse '{path}': {problem}"))


def merged(path: str, *, root: str = "", containerd: tuple[int, int] | None = None) -> tuple[dict[str, Any], int]:
    """The configuration with its imports as this `containerd` reads it, and its version; the files are below `root`.

    An unknown containerd is one of 1.x for a file of version 2.

    Raises OSError, FailedPrecondition naming the file.
    """
    first = read_document(path, root)
    version = first.get("version", 1)
    if not isinstance(version, int) or isinstance(version, bool):
        raise FailedPrecondition(f"read '{path}': version is not a number")
    replaces_plugins = version < 3 if containerd is None else containerd < (2, 0)
    document: dict[str, Any] = {}
    for file in [path, *_imported(first, path, root)][:_MAX_FILES]:
        _add(document, first if file == path else read_document(file, root), replaces_plugins=replaces_plugins)
    return document, version


def replacing_import(path: str) -> str:
    """The imported file whose CRI table makes containerd 1.x drop that of `path`, or an empty text."""
    try:
        files = sorted(_imported(read_document(path, ""), path, ""))
        return next((file for file in files if table_at(read_document(file, ""), "plugins", _CRI_1)), "")
    except (OSError, FailedPrecondition):
        return ""


def _imported(document: Mapping[str, Any], path: str, root: str) -> list[str]:
    """The files below `root` that the configuration `path` imports. Raises FailedPrecondition."""
    return [found for pattern in import_patterns(document, path) for found in _expanded(pattern, path, root)]


def import_patterns(document: Mapping[str, Any], path: str) -> list[str]:
    """The absolute patterns of the document's `imports`. Raises FailedPrecondition."""
    imports = document.get("imports", [])
    if not isinstance(imports, list) or not all(isinstance(pattern, str) for pattern in imports):
        raise FailedPrecondition(f"read '{path}': imports is not a list of paths")
    return [posixpath.normpath(posixpath.join(posixpath.dirname(path), pattern)) for pattern in imports]


def is_imported(file: str, patterns: Sequence[str], path: str) -> bool:
    """The file is named by one of the patterns of the configuration `path`. Raises FailedPrecondition."""
    return any(_go_pattern(each, path).fullmatch(file) if "*" in each else each == file for each in patterns)


def _expanded(pattern: str, path: str, root: str) -> list[str]:
    """The files that containerd finds: it takes a path without `*` as it is. Source: resolveImports, filepath.Glob."""
    if "*" not in pattern:
        return [pattern] if os.path.exists(f"{root}{pattern}") else []
    found = [""]
    for part in pattern.strip("/").split("/"):
        match = _go_pattern(part, path).fullmatch
        found = [f"{above}/{name}" for above in found for name in _names_in(f"{root}{above}/") if match(name)]
    return sorted(found)


def _names_in(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def _go_pattern(pattern: str, path: str) -> re.Pattern[str]:
    """The pattern as Go's filepath.Match takes it: neither `*` nor `?` matches a slash, and `^` negates a class."""
    try:
        tokens = _GO_TOKEN.findall(pattern)
        if "".join(tokens) != pattern:
            raise ValueError("it has a class without end, or ends with a backslash")
        return re.compile("".join(_go_token(each) for each in tokens), re.DOTALL)
    except (re.error, ValueError) as error:
        raise FailedPrecondition(f"read '{path}': imports has a bad pattern '{pattern}': {error}") from error


def _go_token(token: str) -> str:
    if token in ("*", "?"):
        return "[^/]" + token.replace("?", "")
    if token.startswith("[") and len(token) > 1:
        negated = token.startswith("[^")
        ranges = re.findall(r"(\\?.)(?:-(\\?.))?", token[1 + negated : -1], re.DOTALL)
        inside = "".join(f"{_escaped(low)}-{_escaped(high)}" if high else _escaped(low) for low, high in ranges)
        return f"(?!/)[{'^' * negated}{inside}]"
    return _escaped(token)


def _escaped(token: str) -> str:
    return re.escape(token[-1])


def runtimes_in(document: Mapping[str, Any]) -> dict[str, Any]:
    """The CRI plugin's runtimes that the document itself names."""
    found: dict[str, Any] = {}
    for plugin in (_CRI_1, _CRI_2):
        found |= table_at(document, "plugins", plugin, "containerd", "runtimes")
    return found


def snapshotter_in(document: Mapping[str, Any]) -> str:
    """The CRI plugin's snapshotter; empty if the document has none."""
    tables = [table_at(document, "plugins", plugin, "containerd") for plugin in (_CRI_1, _CRI_2)]
    tables.append(table_at(document, "plugins", _IMAGE_PLUGIN))
    return next((str(each["snapshotter"]) for each in tables if each.get("snapshotter")), "")


def table_at(document: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """The table below these keys; empty if one of them is missing or not a table."""
    found: Any = document
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, dict) else {}


def read_document(path: str, root: str) -> dict[str, Any]:
    """The file `path` below `root`. Raises OSError, FailedPrecondition naming `path`."""
    with open(f"{root}{path}", "rb") as file:
        content = file.read()
    try:
        return parsed(content.decode(), path)
    except UnicodeDecodeError as error:
        raise FailedPrecondition(f"parse '{path}': {error}") from error


def _add(document: dict[str, Any], file: dict[str, Any], *, replaces_plugins: bool) -> None:
    """containerd 1.x takes a plugin's settings from the last file that has any; 2.x merges them."""
    for key, value in file.items():
        if key == "plugins" and isinstance(value, dict) and replaces_plugins:
            document["plugins"] = {**table_at(document, "plugins"), **value}
        elif isinstance(value, dict):
            document[key] = combined(table_at(document, key), value)
        else:
            document[key] = value


def combined(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `over`, table by table."""
    return {
        **base,
        **{
            key: combined(table_at(base, key), value) if isinstance(value, dict) else value
            for key, value in over.items()
        },
    }
