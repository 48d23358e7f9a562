"""The nouns of a spec, and their JSON. Absent numbers are None: 0 is a value (root's uid, the first minor)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import chain
from typing import Any

NO_PERMISSIONS = "none"

_WORDS = {"id": "ID", "cmt": "CMT", "mbm": "MBM"}
"""Parts of names that the specification does not write with one capital."""


def json_name(field_name: str) -> str:
    """The member's name in a document: `hostPath` of `host_path`."""
    first, *others = field_name.split("_")
    return first + "".join(_WORDS.get(word) or word.capitalize() for word in others)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceNode:
    path: str
    host_path: str = ""
    type: str = ""
    """`b`, `c`, `u` or `p`; empty: that of the host's node."""
    major: int | None = None
    minor: int | None = None
    file_mode: int | None = None
    permissions: str = ""
    """A subset of `rwm`; empty: all of it; `none`: nothing of it."""
    uid: int | None = None
    gid: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NetDevice:
    host_interface_name: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    host_path: str
    container_path: str
    options: tuple[str, ...] = ()
    type: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hook:
    hook_name: str
    path: str
    args: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    timeout: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IntelRdt:
    clos_id: str = ""
    l3_cache_schema: str = ""
    mem_bw_schema: str = ""
    schemata: tuple[str, ...] = ()
    enable_monitoring: bool = False
    enable_cmt: bool = False
    enable_mbm: bool = False
    """The last two in versions 0.7.0 to 1.0.0 only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerEdits:
    env: tuple[str, ...] = ()
    device_nodes: tuple[DeviceNode, ...] = ()
    net_devices: tuple[NetDevice, ...] = ()
    mounts: tuple[Mount, ...] = ()
    hooks: tuple[Hook, ...] = ()
    intel_rdt: IntelRdt | None = None
    additional_gids: tuple[int, ...] = ()

    @property
    def is_empty(self) -> bool:
        return self == ContainerEdits()

    @staticmethod
    def joined(edits: Iterable["ContainerEdits"]) -> "ContainerEdits":
        """All `edits`, in their order."""
        each = tuple(edits)
        return ContainerEdits(
            env=tuple(chain.from_iterable(one.env for one in each)),
            device_nodes=tuple(chain.from_iterable(one.device_nodes for one in each)),
            net_devices=tuple(chain.from_iterable(one.net_devices for one in each)),
            mounts=tuple(chain.from_iterable(one.mounts for one in each)),
            hooks=tuple(chain.from_iterable(one.hooks for one in each)),
            intel_rdt=next((one.intel_rdt for one in reversed(each) if one.intel_rdt), None),
            additional_gids=tuple(chain.from_iterable(one.additional_gids for one in each)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    name: str
    annotations: Mapping[str, str] = field(default_factory=dict)
    container_edits: ContainerEdits


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    cdi_version: str
    kind: str
    annotations: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[Device, ...]
    container_edits: ContainerEdits = ContainerEdits()

    def all_edits(self) -> tuple[ContainerEdits, ...]:
        return (self.container_edits, *(device.container_edits for device in self.devices))


def as_json(value: object) -> Any:
    """The document of a Spec or of a part of one, without absent, empty and false members."""
    if is_dataclass(value):
        document = {}
        for each in fields(value):
            member = getattr(value, each.name)
            if member in (None, "", (), {}) or member is False:
                continue
            if isinstance(member, ContainerEdits) and member.is_empty and not isinstance(value, Device):
                continue
            document[json_name(each.name)] = as_json(member)
        return document
    if isinstance(value, tuple):
        return [as_json(item) for item in value]
    if isinstance(value, Mapping):
        return dict(value)
    return value
