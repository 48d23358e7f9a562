"""The Container Device Interface, specification versions 0.3.0 to 1.1.0, as a library: see README.md.

It is used on the host, to resolve the names of devices, and in the guest, to give a container its devices. Start with
`cache.py` (directories of specs, resolution) and `inject.py` (edits of an OCI spec); `spec.py` has the nouns. PyYAML is
loaded when a file is not JSON.
"""

from .cache import DEFAULT_DIRECTORIES, Cache, CachedDevice
from .errors import CdiError, DeviceConflict, InjectionFailed, InvalidName, InvalidSpec, UnresolvedDevices
from .files import parse_spec, read_spec
from .inject import inject
from .names import QualifiedName, is_qualified_name, parse_annotations, parse_qualified_name
from .spec import (
    KNOWN_VERSIONS,
    ContainerEdits,
    Device,
    DeviceNode,
    Hook,
    IntelRdt,
    Mount,
    NetDevice,
    Spec,
    as_json,
    minimum_version,
)

__all__ = [
    "DEFAULT_DIRECTORIES",
    "KNOWN_VERSIONS",
    "Cache",
    "CachedDevice",
    "CdiError",
    "ContainerEdits",
    "Device",
    "DeviceConflict",
    "DeviceNode",
    "Hook",
    "InjectionFailed",
    "IntelRdt",
    "InvalidName",
    "InvalidSpec",
    "Mount",
    "NetDevice",
    "QualifiedName",
    "Spec",
    "UnresolvedDevices",
    "as_json",
    "inject",
    "is_qualified_name",
    "minimum_version",
    "parse_annotations",
    "parse_qualified_name",
    "parse_spec",
    "read_spec",
]
