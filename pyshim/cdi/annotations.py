"""Requests for devices by annotation: `cdi.k8s.io/<plugin>_<device id> = vendor/class=name,...`."""

from collections.abc import Mapping

from .errors import InvalidName
from .names import parse_qualified_name

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
