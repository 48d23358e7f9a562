"""The Container Device Interface, specification versions 0.3.0 to 1.1.0, as a library of its own.

It imports nothing of the project and is used from both sides: on the host, to learn what a device's name stands for,
and in the guest, to give a container its devices. Start with `cache.py` (directories of specs, resolution) and
`inject.py` (what a device does to an OCI spec); `spec.py` has the nouns. YAML is the one thing that needs a package
(PyYAML), which is loaded when a file is not JSON.

    cache = Cache()
    cache.inject(oci_spec, ["vendor.com/gpu=0"])
"""

from pyshim.cdi.annotations import annotation_key, annotation_value, parse_annotations, update_annotations
from pyshim.cdi.cache import DEFAULT_DIRECTORIES, Cache, CachedDevice
from pyshim.cdi.errors import CdiError, DeviceConflict, InjectionFailed, InvalidName, InvalidSpec, UnresolvedDevices
from pyshim.cdi.files import read_spec, remove_spec, spec_file_name, write_spec
from pyshim.cdi.inject import inject
from pyshim.cdi.names import QualifiedName, is_qualified_name, parse_qualified_name
from pyshim.cdi.parse import parse_spec
from pyshim.cdi.spec import ContainerEdits, Device, DeviceNode, Hook, IntelRdt, Mount, NetDevice, Spec, as_json
from pyshim.cdi.version import CURRENT_VERSION, KNOWN_VERSIONS, minimum_version

__all__ = [
    "CURRENT_VERSION",
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
    "annotation_key",
    "annotation_value",
    "as_json",
    "inject",
    "is_qualified_name",
    "minimum_version",
    "parse_annotations",
    "parse_qualified_name",
    "parse_spec",
    "read_spec",
    "remove_spec",
    "spec_file_name",
    "update_annotations",
    "write_spec",
]
