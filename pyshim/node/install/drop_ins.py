"""The runtime handlers as containerd's and CRI-O's configuration has them. Pure.

containerd 1.x takes the CRI plugin's settings from one file: those of an imported file would replace all of
config.toml's, so the handlers go into config.toml itself. containerd 2.x merges imported files. A drop-in has the
version of the configuration that imports it: containerd would migrate an older one at each start, with a warning.
"""

import posixpath
from collections.abc import Collection, Mapping
from enum import Enum
from typing import Any

import msgspec

from pyshim.model.errors import AlreadyExists, FailedPrecondition, Unimplemented
from pyshim.node.install.containerd_config import (
    CRI_PLUGINS,
    config_versions,
    import_patterns,
    is_imported,
    parsed,
    rewrite_hint,
    runtimes_in,
)
from pyshim.node.install.handlers import Handler
from pyshim.node.install.writes import BlockWrite, FileWrite, Write
from pyshim.start.dialect import RUNTIME

_SANDBOX_API = (2, 3)
"""The first containerd whose Sandbox API the shim was tested with."""
CONTAINERD_DROP_IN = "/etc/containerd/conf.d/pyshim.toml"
_BASE_TEMPLATE = '{{ template "base" . }}\n'
_HEAD = "# Written by `pyshim install`. Settings of your own go into another file.\n"
_RUNC = f'''\
[plugins."{CRI_PLUGINS[2]}".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
'''
"""containerd 1.x has no default runtime any more once a file names another one only."""


class Layout(Enum):
    """Who writes containerd's configuration, and where it takes additions."""

    FILE = "file"
    """The operator writes it: additions go into it, or into files that it imports."""
    SOURCE = "source"
    """The distribution makes it from `config_path`, which the operator writes."""
    RENDERED = "rendered"
    """k3s and RKE2 write it: additions go into the directory that it imports, or into a template beside it."""
    DIRECTORY = "directory"
    """k0s writes it, with all files of a directory."""


class Containerd(msgspec.Struct, frozen=True, kw_only=True):
    """The containerd of a node, and its configuration without what is ours."""

    version: tuple[int, int]
    config_path: str
    config_text: str | None
    """None without such a file."""
    layout: Layout = Layout.FILE
    drop_in: str = CONTAINERD_DROP_IN
    """A file of our own, where drop-ins are possible."""
    effective_runtimes: frozenset[str] = frozenset()
    """The handlers of other origin, those in imported files included."""


def containerd_writes(containerd: Containerd, handlers: tuple[Handler, ...], *, shim: str) -> list[Write]:
    """The changes of its configuration with which this containerd has `handlers`; `shim` is the program.

    Raises Unimplemented for a release that is not known, FailedPrecondition for a configuration that cannot take them,
    AlreadyExists for a handler of one of these names that is not ours.
    """
    _check_release(containerd.version, handlers)
    if containerd.layout is Layout.DIRECTORY:
        version = max(each for each in config_versions(containerd.version) if each <= 3)
        return [_drop_in(containerd.drop_in, handlers, version, shim)]
    if containerd.config_text is None:
        return _into_new_file(containerd, handlers, shim)
    return _into_file(containerd, parsed(containerd.config_text, containerd.config_path), handlers, shim)


def _check_release(version: tuple[int, int], handlers: tuple[Handler, ...]) -> None:
    major, minor = version
    if version not in ((1, 6), (1, 7)) and major != 2:
        raise Unimplemented(f"configure containerd {major}.{minor}: known are 1.6, 1.7 and 2.x")
    if version < _SANDBOX_API and any(handler.sandboxer == "shim" for handler in handlers):
        raise FailedPrecondition(f'configure containerd {major}.{minor}: sandboxer "shim" needs 2.3')


def _into_new_file(containerd: Containerd, handlers: tuple[Handler, ...], shim: str) -> list[Write]:
    """containerd has no configuration file yet, and runs with its defaults."""
    path, drop_in = containerd.config_path, containerd.drop_in
    if containerd.layout is not Layout.FILE:
        raise FailedPrecondition(f"add runtimes to '{path}': it is not there (hint: start the node's Kubernetes once)")
    _refuse_foreign({handler.name for handler in handlers} & containerd.effective_runtimes, path)
    # All of the directory, which newer releases import when they have no configuration.
    imports = f'imports = ["{posixpath.dirname(drop_in)}/*.toml"]\n'
    if containerd.version >= (2, 0):
        version = config_versions(containerd.version)[-1]
        config = BlockWrite(path=path, body=f"{_HEAD}version = {version}\n{imports}", first=True)
        return [_drop_in(drop_in, handlers, version, shim), config]
    text = f"{_HEAD}version = 2\n{imports}{_RUNC}{_tables(handlers, 2, shim)}"
    return [BlockWrite(path=path, body=text, first=True)]


def _into_file(
    containerd: Containerd, document: Mapping[str, Any], handlers: tuple[Handler, ...], shim: str
) -> list[Write]:
    """containerd has a configuration, which is `document`."""
    path, drop_in = containerd.config_path, containerd.drop_in
    disabled = document.get("disabled_plugins", [])
    if isinstance(disabled, list) and any(plugin in disabled for plugin in ("cri", *CRI_PLUGINS.values())):
        hint = "take it out of disabled_plugins for Kubernetes; --kind docker needs no CRI"
        raise FailedPrecondition(f"add runtimes to '{path}': it disables the CRI plugin (hint: {hint})")
    version = _version(document, containerd.version, path)
    named = runtimes_in(document)
    # What a distribution rendered has our handlers, too, once it was restarted.
    taken = containerd.effective_runtimes | (named.keys() if containerd.layout is Layout.FILE else frozenset())
    _refuse_foreign({handler.name for handler in handlers} & taken, path)
    imported = import_patterns(document, path)
    if containerd.layout is Layout.RENDERED:
        return [_into_rendered(containerd, version, imported, handlers, shim)]
    tables = _tables(handlers, version, shim)
    if version == 2:
        return [BlockWrite(path=path, body=tables if named else _RUNC + tables)]
    file = _drop_in(drop_in, handlers, version, shim)
    if is_imported(drop_in, imported, path):
        return [file]
    if "imports" in document:
        # TOML allows a key once, and the operator's list must stay as it is.
        return [BlockWrite(path=path, body=tables)]
    return [file, BlockWrite(path=path, body=f'imports = ["{drop_in}"]\n', first=True)]


def _into_rendered(
    containerd: Containerd, version: int, imported: list[str], handlers: tuple[Handler, ...], shim: str
) -> Write:
    """k3s and RKE2 import a directory since 2025, which containerd 2.x merges; else they render a template."""
    name = "config.toml" if version == 2 else "config-v3.toml"
    directory = posixpath.dirname(containerd.config_path)
    drop_in = f"{directory}/{name}.d/pyshim.toml"
    if containerd.version >= (2, 0) and is_imported(drop_in, imported, containerd.config_path):
        return _drop_in(drop_in, handlers, version, shim)
    return BlockWrite(path=f"{directory}/{name}.tmpl", body=_tables(handlers, version, shim), before=_BASE_TEMPLATE)


def _drop_in(path: str, handlers: tuple[Handler, ...], version: int, shim: str) -> FileWrite:
    return FileWrite(path=path, content=f"{_HEAD}version = {version}\n{_tables(handlers, version, shim)}")


def _tables(handlers: tuple[Handler, ...], version: int, shim: str) -> str:
    return "".join(_table(handler, version, shim) for handler in handlers)


def _table(handler: Handler, version: int, shim: str) -> str:
    table = f'plugins."{CRI_PLUGINS[version]}".containerd.runtimes.{handler.name}'
    # privileged_without_host_devices: the host's devices mean nothing inside a VM.
    # containerd 1.x has no sandboxers.
    has_key = version >= 3 or handler.sandboxer == "shim"
    sandboxer = f'  sandboxer = "{handler.sandboxer}"\n' if has_key else ""
    names_one = handler.snapshotter and not handler.guest_pulls
    snapshotter = f'  snapshotter = "{handler.snapshotter}"\n' if names_one else ""
    return f"""\
[{table}]
  runtime_type = "{RUNTIME}"
  runtime_path = "{shim}"
  privileged_without_host_devices = true
  pod_annotations = ["io.katacontainers.*"]
  container_annotations = ["io.katacontainers.*", "io.kubernetes.container.terminationMessage*"]
{sandboxer}{snapshotter}\
  [{table}.options]
    ConfigPath = "{handler.config_path}"
"""


def crio_text(handlers: tuple[Handler, ...], shim: str) -> str:
    """A file for /etc/crio/crio.conf.d."""
    tables = [
        f"""\
[crio.runtime.runtimes.{handler.name}]
runtime_type = "vm"
runtime_path = "{shim}"
runtime_root = "/run/vc"
runtime_config_path = "{handler.config_path}"
privileged_without_host_devices = true
{"runtime_pull_image = true" + chr(10) if handler.guest_pulls else ""}"""
        for handler in handlers
    ]
    return _HEAD + "".join(tables)


def _version(document: Mapping[str, Any], containerd: tuple[int, int], path: str) -> int:
    version = document.get("version", 1)
    known = config_versions(containerd)
    if version not in known:
        numbers = " or ".join(map(str, known))
        said = "has no 'version', so it is of version 1" if "version" not in document else f"is of version {version!r}"
        hint = rewrite_hint(containerd, version if isinstance(version, int) else max(known))
        raise FailedPrecondition(
            f"add runtimes to '{path}': it {said}, and {numbers} is needed (hint: '{hint}' prints one)"
        )
    return int(version)


def _refuse_foreign(names: Collection[str], path: str) -> None:
    if names:
        raise AlreadyExists(
            f"add runtime '{min(names)}' to containerd: '{path}' or a file that it imports has one of this name that"
            " 'pyshim install' did not write"
        )
