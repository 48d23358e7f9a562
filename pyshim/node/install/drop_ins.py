"""The runtime handlers as containerd's and CRI-O's configuration has them. Pure.

containerd 1.x takes the CRI plugin's settings from one file: those of an imported file would replace all of
config.toml's, so the handlers go into config.toml itself. containerd 2.x merges imported files; a drop-in of version
3 may be imported by a configuration of version 3 or 4.
"""

import fnmatch
import posixpath
from collections.abc import Mapping
from enum import Enum
from typing import Any

import msgspec

from pyshim.model.errors import AlreadyExists, FailedPrecondition, Unimplemented
from pyshim.node.install.containerd_config import CRI_PLUGINS, config_versions, parsed, rewrite_hint, runtimes_in
from pyshim.node.install.writes import BlockWrite, FileWrite, Write
from pyshim.start.info import RUNTIME

_KNOWN = ((1, 6), (1, 7))
_KNOWN_MAJOR = 2
SANDBOXERS = ("podsandbox", "shim")
_SANDBOX_API = (2, 3)
"""The first containerd whose Sandbox API the shim was shown with."""
CONTAINERD_DROP_IN = "/etc/containerd/conf.d/pyshim.toml"
_BASE_TEMPLATE = '{{ template "base" . }}\n'
_HEAD = "# Written by `pyshim install`. Settings of your own go into another file.\n"


class Handler(msgspec.Struct, frozen=True, kw_only=True):
    """One name that a RuntimeClass can have as its handler."""

    name: str
    source: str
    """The file of configs/ that it starts from."""
    config_path: str
    turned_on: str = ""
    """A key that is false in `source` and true for this handler."""
    is_local: bool = True
    """Its VMs run on the node, in QEMU."""
    guest_pulls: bool = False
    """Its guests pull the images themselves."""
    sandboxer: str = "podsandbox"
    """With `shim`, containerd makes its pods by the Sandbox API, without a pause container."""
    snapshotter: str = ""
    """containerd's snapshotter for its images, if its guests do not pull them; empty for that of the CRI plugin."""
    drop_in: str | None = None
    """The text of a file in `config.d` beside `config_path`; None without one."""


def _shipped(name: str, source: str, **settings: Any) -> Handler:
    directory = name.replace("pykata", "/etc/pyshim").replace("-", "/")
    return Handler(name=name, source=source, config_path=f"{directory}/configuration.toml", **settings)


HANDLERS = (
    _shipped("pykata", "configuration-qemu.toml"),
    _shipped("pykata-tdx", "configuration-qemu-tdx.toml", guest_pulls=True),
    _shipped("pykata-snp", "configuration-qemu-snp.toml", guest_pulls=True),
    _shipped("pykata-remote", "configuration-remote.toml", is_local=False, guest_pulls=True),
    _shipped("pykata-debug", "configuration-qemu.toml", turned_on="enable_debug"),
    _shipped("pykata-warm", "configuration-qemu.toml", turned_on="enable_template"),
)


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
    """The changes of its configuration with which this containerd has `handlers`.

    Raises Unimplemented for a release that is not known, FailedPrecondition for a configuration that cannot take them,
    AlreadyExists for a handler of one of these names that is not ours.
    """
    path, drop_in = containerd.config_path, containerd.drop_in
    check_version(containerd.version)
    if containerd.version < _SANDBOX_API and any(handler.sandboxer == "shim" for handler in handlers):
        raise FailedPrecondition(
            f'configure containerd {containerd.version[0]}.{containerd.version[1]}: sandboxer "shim" needs 2.3'
        )
    names = {handler.name for handler in handlers}
    if containerd.layout is Layout.DIRECTORY:
        version = max(each for each in config_versions(containerd.version) if each <= 3)
        text = f"{_HEAD}version = {version}\n{handlers_text(handlers, version, shim)}"
        return [FileWrite(path=drop_in, content=text)]
    if containerd.config_text is None and containerd.layout is not Layout.FILE:
        raise FailedPrecondition(f"add runtimes to '{path}': it is not there (hint: start the node's Kubernetes once)")
    if containerd.config_text is None:
        _refuse_others(names & containerd.effective_runtimes, path)
        # All of the directory, which newer releases import when they have no configuration.
        imports = f'imports = ["{posixpath.dirname(drop_in)}/*.toml"]\n'
        if containerd.version >= (2, 0):
            head = f"{_HEAD}version = 3\n"
            own = FileWrite(path=drop_in, content=head + handlers_text(handlers, 3, shim))
            return [own, BlockWrite(path=path, body=head + imports, first=True)]
        text = f"{_HEAD}version = 2\n{imports}{_runc()}{handlers_text(handlers, 2, shim)}"
        return [BlockWrite(path=path, body=text, first=True)]

    document = parsed(containerd.config_text, path)
    version = _version(document, containerd.version, path)
    named = runtimes_in(document)
    _refuse_others(names & (containerd.effective_runtimes | named.keys()), path)
    disabled = document.get("disabled_plugins", [])
    if isinstance(disabled, list) and any(plugin in disabled for plugin in ("cri", *CRI_PLUGINS.values())):
        raise FailedPrecondition(f"add runtimes to '{path}': it disables the CRI plugin (hint: see disabled_plugins)")

    text = handlers_text(handlers, version, shim)
    imports = document.get("imports", [])
    if not isinstance(imports, list) or not all(isinstance(pattern, str) for pattern in imports):
        raise FailedPrecondition(f"add runtimes to '{path}': imports is not a list of paths")
    imported = [_absolute(pattern, path) for pattern in imports]
    if containerd.layout is Layout.RENDERED:
        return [_to_rendered(containerd, version, imported, text)]
    if version == 2:
        return [BlockWrite(path=path, body=text if named else _runc() + text)]
    own = FileWrite(path=drop_in, content=f"{_HEAD}version = 3\n{text}")
    if any(fnmatch.fnmatch(drop_in, pattern) for pattern in imported):
        return [own]
    if "imports" in document:
        # TOML allows a key once, and the operator's list must stay as it is.
        return [BlockWrite(path=path, body=text)]
    return [own, BlockWrite(path=path, body=f'imports = ["{drop_in}"]\n', first=True)]


def _to_rendered(containerd: Containerd, version: int, imports: list[str], text: str) -> Write:
    """k3s and RKE2 import a directory since 2025, which containerd 2.x merges; else they render a template."""
    name = "config.toml" if version == 2 else "config-v3.toml"
    directory = posixpath.dirname(containerd.config_path)
    drop_in = f"{directory}/{name}.d/pyshim.toml"
    if containerd.version >= (2, 0) and any(fnmatch.fnmatch(drop_in, pattern) for pattern in imports):
        return FileWrite(path=drop_in, content=f"{_HEAD}version = {version}\n{text}")
    return BlockWrite(path=f"{directory}/{name}.tmpl", body=text, before=_BASE_TEMPLATE)


def check_version(version: tuple[int, int]) -> None:
    """Raises Unimplemented for a containerd that the drop-ins were not made for."""
    if version not in _KNOWN and version[0] != _KNOWN_MAJOR:
        raise Unimplemented(f"configure containerd {version[0]}.{version[1]}: known are 1.6, 1.7 and 2.x")


def handlers_text(handlers: tuple[Handler, ...], version: int, shim: str) -> str:
    """The tables of the handlers in a configuration of this version; `shim` is the program."""
    return "".join(_table(handler, version, shim) for handler in handlers)


def _table(handler: Handler, version: int, shim: str) -> str:
    table = f'plugins."{CRI_PLUGINS[version]}".containerd.runtimes.{handler.name}'
    # privileged_without_host_devices: the host's devices mean nothing inside a VM.
    # containerd 1.x has no sandboxers.
    has_key = version >= 3 or handler.sandboxer != SANDBOXERS[0]
    sandboxer = f'  sandboxer = "{handler.sandboxer}"\n' if has_key else ""
    names_one = handler.snapshotter and not handler.guest_pulls
    snapshotter = f'  snapshotter = "{handler.snapshotter}"\n' if names_one else ""
    return f"""\
[{table}]
  runtime_type = "{RUNTIME}"
  runtime_path = "{shim}"
  privileged_without_host_devices = true
  pod_annotations = ["io.katacontainers.*"]
  container_annotations = ["io.katacontainers.*"]
{sandboxer}{snapshotter}\
  [{table}.options]
    ConfigPath = "{handler.config_path}"
"""


def _runc() -> str:
    """containerd 1.x forgets its default runtime when a file names another one only."""
    return f'[plugins."{CRI_PLUGINS[2]}".containerd.runtimes.runc]\n  runtime_type = "io.containerd.runc.v2"\n'


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


def _refuse_others(names: set[str] | frozenset[str], path: str) -> None:
    if names:
        raise AlreadyExists(
            f"add runtime '{min(names)}' to containerd: '{path}' or a file that it imports has one of this name that"
            " 'pyshim install' did not write"
        )


def _absolute(pattern: str, config_path: str) -> str:
    return posixpath.join(posixpath.dirname(config_path), pattern)
