"""The OCI runtime spec: the parts that plans depend on, typed, and the whole JSON object as it was read.

Source: OCI runtime-spec 1.1, config.md and config-linux.md.
"""

import json
import posixpath
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from pyshim.model.decoding import Text, decoded, described
from pyshim.model.errors import InvalidArgument

MAX_SPEC_BYTES = 16 * 1024 * 1024
MAX_MOUNTS = 4096
"""The most mounts of one container. Each takes up to four of a mount namespace's 100,000 (fs.mount-max)."""


class OciMount(msgspec.Struct, frozen=True, kw_only=True):
    destination: str
    type: str
    source: str
    options: tuple[str, ...]

    @property
    def is_bind(self) -> bool:
        return self.type == "bind" or "bind" in self.options or "rbind" in self.options

    @property
    def is_read_only(self) -> bool:
        return "ro" in self.options or self.is_read_only_recursive

    @property
    def is_read_only_recursive(self) -> bool:
        """The mounts below the source become read-only, too."""
        return "rro" in self.options


class OciNamespace(msgspec.Struct, frozen=True, kw_only=True):
    type: Text
    path: Text = ""


class OciDevice(msgspec.Struct, frozen=True, kw_only=True):
    path: Text
    type: Text
    major: int = 0
    minor: int = 0


class OciHook(msgspec.Struct, frozen=True, kw_only=True):
    path: Text
    args: tuple[Text, ...] | None = None
    """The whole argv; argv[0] may differ from `path`."""
    env: tuple[Text, ...] | None = None
    """The whole environment."""
    timeout: int | None = None
    """In seconds."""


class OciHooks(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Programs to run at points of a container's life, each list in order. None (null in JSON) is an empty list."""

    prestart: tuple[OciHook, ...] | None = None
    create_runtime: tuple[OciHook, ...] | None = None
    create_container: tuple[OciHook, ...] | None = None
    start_container: tuple[OciHook, ...] | None = None
    poststart: tuple[OciHook, ...] | None = None
    poststop: tuple[OciHook, ...] | None = None


NO_HOOKS = OciHooks()


class OciSpec(msgspec.Struct, frozen=True, kw_only=True):
    root_path: str
    hostname: str
    terminal: bool
    mounts: tuple[OciMount, ...]
    namespaces: tuple[OciNamespace, ...]
    devices: tuple[OciDevice, ...]
    cgroups_path: str
    annotations: Mapping[str, str]
    hooks: OciHooks
    raw: Mapping[str, Any]
    selinux_label: str = ""
    """The label of the container's process. containerd gives all containers of a pod the same pair of categories."""

    def is_in_hosts(self, kind: str) -> bool:
        """The container is in the host's namespace of this kind. False if the spec lists no namespaces at all."""
        return bool(self.namespaces) and self.namespace_path(kind) is None

    def namespace_path(self, kind: str) -> str | None:
        """The path of the namespace of `kind` to join; empty for a new one; None for the host's."""
        for namespace in self.namespaces:
            if namespace.type == kind:
                return namespace.path
        return None


class _Process(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    args: tuple[str, ...]
    cwd: Text = "/"
    terminal: bool = False
    selinux_label: Text = ""


class _Root(msgspec.Struct, frozen=True, kw_only=True):
    path: Text


class _Mount(msgspec.Struct, frozen=True, kw_only=True):
    destination: Text
    type: Text = ""
    source: Text = ""
    options: tuple[str, ...] | None = None


class _Rule(msgspec.Struct, frozen=True, kw_only=True):
    access: Text = ""


class _Resources(msgspec.Struct, frozen=True, kw_only=True):
    """The members of `linux.resources` that are read from `OciSpec.raw`: here only their types are checked."""

    cpu: Mapping[str, Any] | None = None
    memory: Mapping[str, Any] | None = None
    devices: tuple[_Rule, ...] | None = None


class _Linux(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    namespaces: tuple[OciNamespace, ...] | None = None
    devices: tuple[OciDevice, ...] | None = None
    cgroups_path: Text = ""
    resources: _Resources | None = None
    sysctl: Mapping[str, str] | None = None


@described
class _Document(msgspec.Struct, frozen=True, kw_only=True):
    """The spec's members that are read. Go writes an empty list or object as null."""

    process: _Process
    root: _Root
    hostname: Text = ""
    mounts: tuple[_Mount, ...] | None = None
    linux: _Linux | None = None
    annotations: Mapping[str, str] | None = None
    hooks: OciHooks | None = None


_NAMESPACES = frozenset({"pid", "network", "ipc", "uts", "mount", "user", "cgroup", "time"})


def parse_spec(data: bytes, where: str) -> OciSpec:
    """The spec in the JSON text `data`. Raises InvalidArgument naming `where` and the first wrong member."""

    def refused(problem: str) -> InvalidArgument:
        return InvalidArgument(f"read spec '{where}': {problem}")

    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise InvalidArgument(f"parse spec '{where}': not JSON: {exc}") from exc
    document = decoded(raw, _Document, refused)
    process, root, linux = document.process, document.root, document.linux or _Linux()
    mounts, namespaces = document.mounts or (), linux.namespaces or ()
    if len(mounts) > MAX_MOUNTS:
        raise refused(f"mounts has {len(mounts)} entries, at most {MAX_MOUNTS} are supported")
    if not process.args:
        raise refused("process.args is empty")
    if not root.path:
        raise refused("root.path is empty")
    directories = {"process.cwd": process.cwd}
    directories |= {f"mounts[{index}].destination": mount.destination for index, mount in enumerate(mounts)}
    for member, path in directories.items():
        if not path.startswith("/"):
            raise refused(f"{member} is not absolute: {path!r}")
    for index, namespace in enumerate(namespaces):
        if namespace.type not in _NAMESPACES:
            raise refused(f"linux.namespaces[{index}].type is not a known namespace: {namespace.type!r}")
    return OciSpec(
        root_path=root.path,
        hostname=document.hostname,
        terminal=process.terminal,
        mounts=tuple(map(_mount, mounts)),
        namespaces=namespaces,
        devices=linux.devices or (),
        cgroups_path=linux.cgroups_path,
        annotations=document.annotations or {},
        hooks=_checked(document.hooks or NO_HOOKS, refused),
        raw=raw,
        selinux_label=process.selinux_label,
    )


_HOOK_KINDS = msgspec.structs.fields(OciHooks)


def _checked(hooks: OciHooks, refused: Callable[[str], InvalidArgument]) -> OciHooks:
    for kind in _HOOK_KINDS:
        for index, hook in enumerate(getattr(hooks, kind.name) or ()):
            where = f"hooks.{kind.encode_name}[{index}]"
            if not hook.path.startswith("/"):
                raise refused(f"{where}.path is not absolute: {hook.path!r}")
            if hook.timeout is not None and hook.timeout <= 0:
                raise refused(f"{where}.timeout is not above zero: {hook.timeout}")
            if any("=" not in variable.removeprefix("=") for variable in hook.env or ()):
                raise refused(f"{where}.env has an entry that is not NAME=value")
    return hooks


def _mount(mount: _Mount) -> OciMount:
    return OciMount(
        destination=posixpath.normpath(mount.destination),
        type=mount.type,
        source=mount.source,
        options=mount.options or (),
    )
