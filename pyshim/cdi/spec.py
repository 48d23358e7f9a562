"""The nouns of a spec and their JSON, the versions of the specification, and the rules for a spec's content.

Absent numbers are None: 0 is a value (root's uid, the first minor). The rules are those of the specification's prose
and of its Go library.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import chain
from typing import Any

from .names import check_device, check_kind

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


KNOWN_VERSIONS = ("0.1.0", "0.2.0", "0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0", "1.1.0")
LEAST_VERSION = "0.3.0"
"""The version of a spec without newer content. A spec that declares 0.1.0 or 0.2.0 is therefore invalid."""


def plain_version(text: str) -> str:
    """`text` without the leading `v` that is tolerated."""
    return text.removeprefix("v")


def is_older(left: str, right: str) -> bool:
    """Both plain and known."""
    return KNOWN_VERSIONS.index(left) < KNOWN_VERSIONS.index(right)


def minimum_version(spec: Spec) -> str:
    """The oldest version that has everything `spec` uses."""
    edits = spec.all_edits()
    rdts = [each.intel_rdt for each in edits if each.intel_rdt is not None]
    if any(each.net_devices for each in edits) or any(rdt.schemata or rdt.enable_monitoring for rdt in rdts):
        return "1.1.0"
    if rdts or any(each.additional_gids for each in edits):
        return "0.7.0"
    if spec.annotations or "." in spec.kind.partition("/")[2] or any(device.annotations for device in spec.devices):
        return "0.6.0"
    has_host_path = any(node.host_path for each in edits for node in each.device_nodes)
    if has_host_path or any(device.name[:1].isdigit() for device in spec.devices):
        return "0.5.0"
    if any(mount.type for each in edits for mount in each.mounts):
        return "0.4.0"
    return LEAST_VERSION


DEVICE_TYPES = ("", "b", "c", "u", "p")
HOOK_NAMES = ("prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop")
MAX_CLOS_ID_BYTES = 4095
MAX_ANNOTATION_BYTES = 256 * 1024
_OLD_RDT_VERSIONS = ("0.7.0", "0.8.0", "1.0.0")
_LABEL = r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?"
_PREFIX = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9_.-]*[a-z0-9])?")


def spec_problems(spec: Spec) -> Iterator[str]:
    """Every rule `spec` breaks, each as `member problem`."""
    version = plain_version(spec.cdi_version)
    if version not in KNOWN_VERSIONS:
        yield f"cdiVersion {spec.cdi_version[:50]!r} is not one of {', '.join(KNOWN_VERSIONS)}"
    if problem := check_kind(spec.kind):
        yield f"kind {spec.kind[:100]!r} {problem}"
    yield from _annotations(spec.annotations, "annotations")
    yield from edits_problems(spec.container_edits, "containerEdits", version)
    if not spec.devices:
        yield "devices has no device"
    seen: set[str] = set()
    for index, device in enumerate(spec.devices):
        at = f"devices[{index}]"
        yield from _device(device, at, version)
        if device.name in seen:
            yield f"{at}.name {device.name!r} is there twice"
        seen.add(device.name)
    needed = minimum_version(spec)
    if version in KNOWN_VERSIONS and is_older(version, needed):
        yield f"cdiVersion {spec.cdi_version!r} is too low: the content needs at least {needed}"


def _device(device: Device, at: str, version: str) -> Iterator[str]:
    if problem := check_device(device.name):
        yield f"{at}.name {device.name[:100]!r} {problem}"
    yield from _annotations(device.annotations, f"{at}.annotations")
    if device.container_edits.is_empty:
        yield f"{at}.containerEdits is empty"
    yield from edits_problems(device.container_edits, f"{at}.containerEdits", version)


def edits_problems(edits: ContainerEdits, at: str, version: str) -> Iterator[str]:
    for index, text in enumerate(edits.env):
        yield from _env(text, f"{at}.env[{index}]")
    for index, node in enumerate(edits.device_nodes):
        yield from _node(node, f"{at}.deviceNodes[{index}]")
    yield from _net_devices(edits.net_devices, f"{at}.netDevices")
    for index, mount in enumerate(edits.mounts):
        yield from _mount(mount, f"{at}.mounts[{index}]")
    for index, hook in enumerate(edits.hooks):
        yield from _hook(hook, f"{at}.hooks[{index}]")
    if edits.intel_rdt is not None:
        yield from _rdt(edits.intel_rdt, f"{at}.intelRdt", version)


def _env(text: str, at: str) -> Iterator[str]:
    name, equals, _ = text.partition("=")
    if not equals:
        yield f"{at} {text[:100]!r} is not NAME=VALUE"
    elif not name:
        yield f"{at} {text[:100]!r} has no name"


def _node(node: DeviceNode, at: str) -> Iterator[str]:
    if not node.path:
        yield f"{at}.path is empty"
    if node.type not in DEVICE_TYPES:
        yield f"{at}.type {node.type[:50]!r} is not one of b, c, u, p"
    if node.permissions != NO_PERMISSIONS and any(char not in "rwm" for char in node.permissions):
        yield f"{at}.permissions {node.permissions[:50]!r} has characters other than r, w, m and is not 'none'"


def _net_devices(devices: tuple[NetDevice, ...], at: str) -> Iterator[str]:
    hosts: set[str] = set()
    names: set[str] = set()
    for index, device in enumerate(devices):
        for member, value, seen in (
            ("hostInterfaceName", device.host_interface_name, hosts),
            ("name", device.name, names),
        ):
            if not value:
                yield f"{at}[{index}].{member} is empty"
            elif value in seen:
                yield f"{at}[{index}].{member} {value[:100]!r} is there twice"
            seen.add(value)


def _mount(mount: Mount, at: str) -> Iterator[str]:
    if not mount.host_path:
        yield f"{at}.hostPath is empty"
    if not mount.container_path:
        yield f"{at}.containerPath is empty"


def _hook(hook: Hook, at: str) -> Iterator[str]:
    if hook.hook_name not in HOOK_NAMES:
        yield f"{at}.hookName {hook.hook_name[:50]!r} is not one of {', '.join(HOOK_NAMES)}"
    if not hook.path:
        yield f"{at}.path is empty"
    for index, text in enumerate(hook.env):
        yield from _env(text, f"{at}.env[{index}]")


def _rdt(rdt: IntelRdt, at: str, version: str) -> Iterator[str]:
    if rdt.clos_id != "/":
        if len(rdt.clos_id.encode()) > MAX_CLOS_ID_BYTES:
            yield f"{at}.closID is longer than {MAX_CLOS_ID_BYTES} bytes"
        if rdt.clos_id in (".", "..") or "/" in rdt.clos_id or "\n" in rdt.clos_id:
            yield f"{at}.closID {rdt.clos_id[:100]!r} is not a directory name"
    for member, is_set in (("enableCMT", rdt.enable_cmt), ("enableMBM", rdt.enable_mbm)):
        if is_set and version not in _OLD_RDT_VERSIONS:
            yield f"{at}.{member} is known from version {_OLD_RDT_VERSIONS[0]} to {_OLD_RDT_VERSIONS[-1]} only"


def _annotations(annotations: Mapping[str, str], at: str) -> Iterator[str]:
    """Kubernetes' rules for annotations, which the specification takes over."""
    size = sum(len(key.encode()) + len(value.encode()) for key, value in annotations.items())
    if size > MAX_ANNOTATION_BYTES:
        yield f"{at} are larger than {MAX_ANNOTATION_BYTES} bytes together"
    for key in annotations:
        prefix, slash, name = key.lower().rpartition("/")
        has_prefix = len(prefix) <= 253 and _PREFIX.fullmatch(prefix)
        if (slash and not has_prefix) or len(name) > 63 or not _NAME.fullmatch(name):
            yield f"{at}[{key[:100]!r}] is not a key of the form [PREFIX/]NAME"
