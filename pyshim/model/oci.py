"""The OCI runtime spec as we read it: the parts decisions depend on, typed, and the whole JSON object passed through.

Source: OCI runtime-spec 1.1, config.md and config-linux.md.
"""

import json
import posixpath
from collections.abc import Mapping
from typing import Any, TypeVar

from pyshim.model.dataclasses import dataclass
from pyshim.model.errors import InvalidArgument

T = TypeVar("T")

MAX_SPEC_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class OciMount:
    destination: str
    type: str
    source: str
    options: tuple[str, ...]

    @property
    def is_bind(self) -> bool:
        return self.type == "bind" or "bind" in self.options or "rbind" in self.options

    @property
    def is_read_only(self) -> bool:
        return "ro" in self.options


@dataclass(frozen=True, slots=True, kw_only=True)
class OciNamespace:
    type: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OciDevice:
    path: str
    type: str
    major: int
    minor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OciSpec:
    root_path: str
    hostname: str
    terminal: bool
    mounts: tuple[OciMount, ...]
    namespaces: tuple[OciNamespace, ...]
    devices: tuple[OciDevice, ...]
    cgroups_path: str
    annotations: Mapping[str, str]
    raw: Mapping[str, Any]

    def namespace_path(self, kind: str) -> str | None:
        """The path of the namespace of `kind` to join; empty for a fresh one; None when the host's is used."""
        for namespace in self.namespaces:
            if namespace.type == kind:
                return namespace.path
        return None


def parse_spec(data: bytes, where: str) -> OciSpec:
    """The spec in `data`; `where` names it in errors. Raises InvalidArgument naming the first wrong member."""
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise InvalidArgument(f"parse spec '{where}': not JSON: {exc}") from exc
    reader = _Reader(where)
    top = reader.mapping(raw, "the document")
    process = reader.mapping(top.get("process"), "process")
    args = reader.list_of(process.get("args"), str, "process.args")
    if not args:
        raise reader.error("process.args", "is empty")
    cwd = reader.scalar(process.get("cwd", "/"), str, "process.cwd")
    if not cwd.startswith("/"):
        raise reader.error("process.cwd", f"is not absolute: {cwd!r}")
    root = reader.mapping(top.get("root"), "root")
    root_path = reader.scalar(root.get("path"), str, "root.path")
    if not root_path:
        raise reader.error("root.path", "is empty")
    linux = reader.mapping(top.get("linux") or {}, "linux")
    _check_resources(reader, linux)
    return OciSpec(
        root_path=root_path,
        hostname=reader.scalar(top.get("hostname", ""), str, "hostname"),
        terminal=reader.scalar(process.get("terminal", False), bool, "process.terminal"),
        mounts=tuple(_mount(reader, item, index) for index, item in enumerate(reader.items(top, "mounts"))),
        namespaces=tuple(
            _namespace(reader, item, index) for index, item in enumerate(reader.items(linux, "namespaces"))
        ),
        devices=tuple(_device(reader, item, index) for index, item in enumerate(reader.items(linux, "devices"))),
        cgroups_path=reader.scalar(linux.get("cgroupsPath", ""), str, "linux.cgroupsPath"),
        annotations=reader.string_map(top.get("annotations"), "annotations"),
        raw=top,
    )


def _check_resources(reader: "_Reader", linux: Mapping[str, Any]) -> None:
    """The members decisions look into are objects, and rules a list of them."""
    resources = reader.mapping(linux.get("resources") or {}, "linux.resources")
    for member in ("cpu", "memory"):
        reader.mapping(resources.get(member) or {}, f"linux.resources.{member}")
    for index, rule in enumerate(reader.items(resources, "devices")):
        name = f"linux.resources.devices[{index}]"
        reader.scalar(reader.mapping(rule, name).get("access", ""), str, f"{name}.access")


def _mount(reader: "_Reader", item: object, index: int) -> OciMount:
    name = f"mounts[{index}]"
    fields = reader.mapping(item, name)
    destination = reader.scalar(fields.get("destination"), str, f"{name}.destination")
    if not destination.startswith("/"):
        raise reader.error(f"{name}.destination", f"is not absolute: {destination!r}")
    return OciMount(
        destination=posixpath.normpath(destination),
        type=reader.scalar(fields.get("type", ""), str, f"{name}.type"),
        source=reader.scalar(fields.get("source", ""), str, f"{name}.source"),
        options=tuple(reader.list_of(fields.get("options"), str, f"{name}.options")),
    )


def _namespace(reader: "_Reader", item: object, index: int) -> OciNamespace:
    name = f"linux.namespaces[{index}]"
    fields = reader.mapping(item, name)
    kind = reader.scalar(fields.get("type"), str, f"{name}.type")
    if kind not in _NAMESPACES:
        raise reader.error(f"{name}.type", f"is not a known namespace: {kind!r}")
    return OciNamespace(type=kind, path=reader.scalar(fields.get("path", ""), str, f"{name}.path"))


def _device(reader: "_Reader", item: object, index: int) -> OciDevice:
    name = f"linux.devices[{index}]"
    fields = reader.mapping(item, name)
    return OciDevice(
        path=reader.scalar(fields.get("path"), str, f"{name}.path"),
        type=reader.scalar(fields.get("type"), str, f"{name}.type"),
        major=reader.scalar(fields.get("major", 0), int, f"{name}.major"),
        minor=reader.scalar(fields.get("minor", 0), int, f"{name}.minor"),
    )


_NAMESPACES = frozenset({"pid", "network", "ipc", "uts", "mount", "user", "cgroup", "time"})


def _is_text(value: str) -> bool:
    """No NUL byte, and no half of a character, which JSON's escapes can spell."""
    return "\0" not in value and not any("\ud800" <= char <= "\udfff" for char in value)


class _Reader:
    """Reads members of an untrusted JSON object, naming the member in every refusal."""

    def __init__(self, where: str) -> None:
        self._where = where

    def error(self, member: str, problem: str) -> InvalidArgument:
        return InvalidArgument(f"read spec '{self._where}': {member} {problem}")

    def mapping(self, value: object, member: str) -> Mapping[str, Any]:
        if value is None:
            raise self.error(member, "is missing")
        if not isinstance(value, dict):
            raise self.error(member, "is not an object")
        return value

    def items(self, parent: Mapping[str, Any], member: str) -> list[Any]:
        value = parent.get(member)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.error(member, "is not a list")
        return value

    def scalar(self, value: object, kind: type[T], member: str) -> T:
        if value is None:
            raise self.error(member, "is missing")
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.error(member, f"is not a {kind.__name__}")
        if isinstance(value, str) and not _is_text(value):
            raise self.error(member, f"is no text a kernel would take: {value[:100]!r}")
        return value

    def list_of(self, value: object, kind: type[T], member: str) -> list[T]:
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            raise self.error(member, f"is not a list of {kind.__name__}")
        return value

    def string_map(self, value: object, member: str) -> Mapping[str, str]:
        if value is None:
            return {}
        if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
            raise self.error(member, "is not an object of strings")
        return value
