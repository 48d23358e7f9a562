"""Reads containerd's configuration: its files with their imports, the CRI plugin's runtimes and snapshotter."""

import glob
import os
import tomllib
from collections.abc import Mapping
from typing import Any

from pyshim.model.decoding import check_toml_keys
from pyshim.model.errors import FailedPrecondition

_CRI_1, _CRI_2 = "io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"
CRI_PLUGINS = {2: _CRI_1, 3: _CRI_2, 4: _CRI_2}
"""The plugin whose table has the runtimes, by version of the configuration."""
_IMAGE_PLUGIN = "io.containerd.cri.v1.images"
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
    try:
        check_toml_keys(content)
        return tomllib.loads(content.removeprefix("\ufeff"))
    except (ValueError, RecursionError) as error:  # ValueError also for a number with too many digits
        raise FailedPrecondition(f"parse '{path}': {error}") from error


def merged(path: str, *, root: str = "") -> tuple[dict[str, Any], int]:
    """The configuration with its imports, and its version; the files are looked for below `root`.

    Raises OSError, FailedPrecondition naming the file.
    """
    first = read_document(path, root)
    version = first.get("version", 1)
    if not isinstance(version, int) or isinstance(version, bool):
        raise FailedPrecondition(f"read '{path}': version is not a number")
    document: dict[str, Any] = {}
    for file in [path, *_imported(first, path, root)][:_MAX_FILES]:
        _add(document, first if file == path else read_document(file, root), replaces_plugins=version < 3)
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
    imports = document.get("imports", [])
    if not isinstance(imports, list):
        raise FailedPrecondition(f"read '{path}': imports is not a list")
    wholes = (os.path.join(os.path.dirname(path), str(pattern)) for pattern in imports)
    return [found.removeprefix(root) for whole in wholes for found in sorted(glob.glob(f"{root}{whole}"))]


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
