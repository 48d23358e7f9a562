"""Variables that a device's spec sets on the host, in a guest where the device has other names. Pure.

Variables of the container's own spec are not changed: they were written for the container.
"""

import re
from collections.abc import Mapping, Sequence

from pyshim.model.devices import VFIO_DIR
from pyshim.resources.devices.plan.devices import Passed

_REWRITTEN_BY_AGENT = "PCIDEVICE_"
"""Kata's agent, and ours, put the guest's PCI addresses into these."""
_KIND_OF_INDICES = {"NVIDIA_VISIBLE_DEVICES": "nvidia.com/gpu", "AMD_VISIBLE_DEVICES": "amd.com/gpu"}
"""Variables that choose devices by index, or by an id that hardware keeps wherever it is."""
_INDEX = re.compile(r"[0-9]{1,4}")
_ADDRESS = re.compile(r"(?<![0-9A-Fa-f:])(?:[0-9A-Fa-f]{4,8}:)?[0-9A-Fa-f]{2}:[01][0-9A-Fa-f]\.[0-7](?![0-9A-Fa-f.])")


def guest_env(
    env: Sequence[str], own: Sequence[Passed], names: Mapping[str, tuple[str, ...]]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(variables as the guest's container gets them, names of those left out).

    `own` are the container's devices, `names` the inner names of each node by its path. Indices become the guest's; ids
    of hardware and `PCIDEVICE_*` stay. Variables with a VFIO node or a PCI address of the host are left out: only the
    agent can see the guest's.
    """
    kept, left_out = [], []
    for text in env:
        name, _, value = text.partition("=")
        kind = _KIND_OF_INDICES.get(name)
        if kind is not None:
            value = _indices(value, kind, own, names)
            text = f"{name}={value}" if value else ""
        elif VFIO_DIR in value or (_ADDRESS.search(value) and not name.startswith(_REWRITTEN_BY_AGENT)):
            text = ""
        if text:
            kept.append(text)
        else:
            left_out.append(name)
    return tuple(kept), tuple(left_out)


def _indices(value: str, kind: str, own: Sequence[Passed], names: Mapping[str, tuple[str, ...]]) -> str:
    """`value` with the guest's indices in place of the host's, empty when the container has no device of the kind."""
    parts = value.split(",")
    if not any(_INDEX.fullmatch(part.strip()) for part in parts):
        return value
    mine = [name for passed in own for name in names.get(passed.node.path, ())]
    # The container has all of these devices, so the index that the host meant does not matter.
    found = [name.partition("=")[2] for name in mine if name.partition("=")[0] == kind]
    return ",".join(found)
