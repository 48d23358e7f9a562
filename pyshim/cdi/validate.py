"""Rules for the content of a well-formed spec: those of the specification's prose and of its Go library."""

import re
from collections.abc import Iterator, Mapping

from .names import check_device, check_kind
from .spec import NO_PERMISSIONS, ContainerEdits, Device, DeviceNode, Hook, IntelRdt, Mount, NetDevice, Spec
from .version import KNOWN_VERSIONS, is_older, minimum_version, plain_version

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
