"""The syntax of QEMU's options, and the ids that devices and their back ends have in QEMU. Pure.

QEMU reads `name,key=value,...`: a comma inside a value is written twice.
"""

import hashlib
import re
from collections.abc import Mapping

Args = tuple[str, ...]
"""Successive arguments of the argv."""
Value = str | int | bool | list[int] | list[str]
Fields = dict[str, Value]
"""The properties of one option or object."""
_NODE_NAME_CHARS = 31


def option(head: str, fields: Mapping[str, Value] | None = None) -> str:
    """`head,key=value,...`: booleans as on or off, a list as one `key=value` for each value."""
    args = []
    for key, value in (fields or {}).items():
        args += [f"{key}={_value(each)}" for each in (value if isinstance(value, list) else [value])]
    return ",".join((head, *args))


def object_args(fields: Mapping[str, Value]) -> Args:
    """-object for the arguments of an object-add, whose `qom-type` is the kind of object."""
    properties = {key: value for key, value in fields.items() if key != "qom-type"}
    return ("-object", option(str(fields["qom-type"]), properties))


def _value(value: str | int | bool) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value).replace(",", ",,")


def qdev_id(device_id: str) -> str:
    return f"virtio-{node_name(device_id)}"


def netdev_id(device_id: str) -> str:
    return f"net-{node_name(device_id)}"


def chardev_id(device_id: str) -> str:
    return f"char-{node_name(device_id)}"


def node_name(device_id: str) -> str:
    """`device_id` if QEMU accepts it as a node name (31 characters, a letter first), else a name with its hash."""
    if len(device_id) <= _NODE_NAME_CHARS and re.fullmatch(r"[A-Za-z][A-Za-z0-9._-]*", device_id):
        return device_id
    return "id-" + hashlib.sha256(device_id.encode()).hexdigest()[:24]
