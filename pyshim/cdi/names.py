"""Names of devices, `vendor.com/class=name`, and annotations that ask for them, `cdi.k8s.io/<plugin>_<device id>`."""

from collections.abc import Mapping
from typing import NamedTuple

from .errors import InvalidName

_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_ALPHANUMERIC = _LETTERS | frozenset("0123456789")
_KIND_INSIDE = _ALPHANUMERIC | frozenset("_-.")
_DEVICE_INSIDE = _KIND_INSIDE | frozenset(":")


class QualifiedName(NamedTuple):
    vendor: str
    device_class: str
    device: str

    @property
    def kind(self) -> str:
        return f"{self.vendor}/{self.device_class}"

    def __str__(self) -> str:
        return f"{self.vendor}/{self.device_class}={self.device}"


def parse_qualified_name(text: str) -> QualifiedName:
    """The parts of `text`. Raises InvalidName saying which part is wrong."""
    kind, equals, device = text.partition("=")
    vendor, slash, device_class = kind.partition("/")
    if text.startswith("/") or not (equals and slash and vendor and device_class and device):
        raise InvalidName(f"parse cdi device {text[:200]!r}: want VENDOR/CLASS=NAME")
    for what, part, check in (
        ("vendor", vendor, check_vendor),
        ("class", device_class, check_vendor),
        ("name", device, check_device),
    ):
        if problem := check(part):
            raise InvalidName(f"parse cdi device {text[:200]!r}: {what} {part[:100]!r} {problem}")
    return QualifiedName(vendor, device_class, device)


def is_qualified_name(text: str) -> bool:
    try:
        parse_qualified_name(text)
    except InvalidName:
        return False
    return True


def check_kind(kind: str) -> str:
    """The problem of `kind`; empty for a valid one."""
    vendor, slash, device_class = kind.partition("/")
    if not slash:
        return "is not VENDOR/CLASS"
    if problem := check_vendor(vendor):
        return f"has a vendor {vendor[:100]!r} that {problem}"
    if problem := check_vendor(device_class):
        return f"has a class {device_class[:100]!r} that {problem}"
    return ""


def check_vendor(text: str) -> str:
    """The problem of a vendor, or of a class, which has the same rule; empty for a valid one."""
    return _check(text, _LETTERS, _KIND_INSIDE, "a letter", "letters, digits, '_', '-' or '.'")


def check_device(text: str) -> str:
    return _check(text, _ALPHANUMERIC, _DEVICE_INSIDE, "a letter or digit", "letters, digits, '_', '-', '.' or ':'")


def _check(text: str, first: frozenset[str], inside: frozenset[str], first_is: str, inside_is: str) -> str:
    if not text:
        return "is empty"
    if text[0] not in first:
        return f"does not begin with {first_is}"
    if any(char not in inside for char in text):
        return f"has characters other than {inside_is}"
    if text[-1] not in _ALPHANUMERIC:
        return "does not end with a letter or digit"
    return ""


ANNOTATION_PREFIX = "cdi.k8s.io/"


def parse_annotations(annotations: Mapping[str, str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(keys, devices) asked for, in the order of the keys' names; a device asked for twice counts once.

    Raises InvalidName naming the key of the first bad name: without that device the container would not work. A key may
    have any name after the prefix, as in the Go library.
    """
    keys = tuple(sorted(key for key in annotations if key.startswith(ANNOTATION_PREFIX)))
    devices: dict[str, None] = {}
    for key in keys:
        for text in annotations[key].split(","):
            try:
                devices[str(parse_qualified_name(text))] = None
            except InvalidName as error:
                raise InvalidName(f"read cdi annotation {key[:200]!r}: {error}") from error
    return keys, tuple(devices)
