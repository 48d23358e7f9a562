"""Requests for devices by annotation: `cdi.k8s.io/<plugin>_<device id> = vendor/class=name,...`."""

from collections.abc import Iterable, Mapping

from pyshim.cdi.errors import InvalidName
from pyshim.cdi.names import parse_qualified_name

ANNOTATION_PREFIX = "cdi.k8s.io/"
MAX_NAME_LENGTH = 63
_ALPHANUMERIC = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789")
_INSIDE = _ALPHANUMERIC | frozenset("_-.")


def annotation_key(plugin: str, device_id: str) -> str:
    """The key for a device that `plugin` gives; a `/` of the id becomes `_`. Raises InvalidName."""
    if not plugin:
        raise InvalidName("make cdi annotation key: the plugin's name is empty")
    if not device_id:
        raise InvalidName(f"make cdi annotation key for plugin {plugin!r}: the device id is empty")
    name = f"{plugin}_{device_id.replace('/', '_')}"
    if problem := _problem(name):
        raise InvalidName(f"make cdi annotation key: name {name[:200]!r} {problem}")
    return f"{ANNOTATION_PREFIX}{name}"


def annotation_value(devices: Iterable[str]) -> str:
    """The value that asks for `devices`. Raises InvalidName for one that is not qualified."""
    return ",".join(str(parse_qualified_name(device)) for device in devices)


def update_annotations(
    annotations: Mapping[str, str], plugin: str, device_id: str, devices: Iterable[str]
) -> dict[str, str]:
    """`annotations` and one more key. Raises InvalidName, also when the key is there already."""
    key = annotation_key(plugin, device_id)
    if key in annotations:
        raise InvalidName(f"add cdi annotation {key!r}: the key is in use")
    return {**annotations, key: annotation_value(devices)}


def parse_annotations(annotations: Mapping[str, str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(keys, devices) asked for, in the order of the keys' names; a device asked for twice counts once.

    Raises InvalidName naming the key: one bad name spoils the whole, since a container would start without it. The key
    may have any name after the prefix, as in the Go library: only its maker has to keep to the rules.
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


def _problem(name: str) -> str:
    if not name:
        return "is empty"
    if len(name) > MAX_NAME_LENGTH:
        return f"is longer than {MAX_NAME_LENGTH} characters"
    if name[0] not in _ALPHANUMERIC or name[-1] not in _ALPHANUMERIC:
        return "does not begin and end with a letter or digit"
    if any(char not in _INSIDE for char in name):
        return "has characters other than letters, digits, '_', '-' or '.'"
    return ""
