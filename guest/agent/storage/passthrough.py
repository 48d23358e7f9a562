"""PCI functions passed through to the guest: waits for them, and replaces host addresses in a container's environment.

- vfio-pci-gk: the guest's kernel drives the function; the container gets devices of the driver, by CDI.
- vfio-pci: the container drives it itself; the function is bound to the guest's vfio-pci and the container has the node
  of its IOMMU group.

Each option is `<host address>=<guest PCI path>`.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Mapping
from functools import partial

from protos.agent.agent_pb2 import Device

from guest.agent.children import Children
from guest.agent.errors import FailedPrecondition, InvalidArgument, os_cause
from guest.agent.files import write_text
from guest.agent.storage.block import SYS, pci_folder, pci_slots
from guest.agent.storage.hotplug import Hotplug

log = logging.getLogger(__name__)

GUEST_DRIVES = "vfio-pci-gk"
_ENV_PREFIX, _ENV_INFO = "PCIDEVICE_", "_INFO"
_DRIVER = "vfio-pci"
_ADDRESS = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f])")


def functions_of(device: Device) -> list[tuple[str, str]]:
    """(host address, guest PCI path) of each option. InvalidArgument names one that is neither."""
    found = []
    for option in device.options:
        host, equals, path = option.partition("=")
        if not equals:
            raise InvalidArgument(f"device {device.container_path!r}: option {option[:80]!r} is not ADDRESS=PATH")
        pci_slots(path)
        found.append((full_address(host), path))
    if not found:
        raise InvalidArgument(f"device {device.container_path!r}: no function is named in its options")
    return found


def full_address(text: str) -> str:
    """`text` with its domain. InvalidArgument for other text than a PCI address."""
    found = _ADDRESS.fullmatch(text.lower())
    if found is None:
        raise InvalidArgument(f"PCI address {text[:80]!r}: want DOMAIN:BUS:SLOT.FUNCTION in hexadecimal digits")
    return f"{found[1] or '0000'}:{found[2]}"


async def find_functions(hotplug: Hotplug, device: Device) -> dict[str, str]:
    """Host address -> guest address of every function of the device, all of which are there."""
    found = {}
    for host, path in functions_of(device):
        folder = await hotplug.wait_for(f"PCI function at path {path!r}", partial(pci_folder, SYS, path))
        found[host] = os.path.basename(folder)
    return found


async def bind(children: Children, device: Device, functions: dict[str, str]) -> str:
    """The node of the IOMMU group that the functions, now bound to vfio-pci, make up. FailedPrecondition otherwise."""
    if not os.path.isdir(f"{SYS}/bus/pci/drivers/{_DRIVER}"):
        await children.load_modules(_DRIVER)
    groups = {bind_function(SYS, address) for address in functions.values()}
    if len(groups) != 1:
        raise FailedPrecondition(
            f"device {device.container_path!r}: its functions are in IOMMU groups {sorted(groups)}"
        )
    return f"/dev/vfio/{groups.pop()}"


def bind_function(sys: str, address: str) -> str:
    """The IOMMU group of the function, which is bound to vfio-pci now."""
    folder = f"{sys}/bus/pci/devices/{address}"
    try:
        group = os.path.basename(os.readlink(f"{folder}/iommu_group"))
    except OSError:
        raise FailedPrecondition(
            f"bind {address} to {_DRIVER}: it is in no IOMMU group (hint: the guest needs an IOMMU)"
        ) from None
    try:
        has_driver = os.path.islink(f"{folder}/driver")
        if has_driver and os.path.basename(os.readlink(f"{folder}/driver")) == _DRIVER:
            return group
        write_text(f"{folder}/driver_override", _DRIVER)
        if has_driver:
            write_text(f"{folder}/driver/unbind", address)
        write_text(f"{sys}/bus/pci/drivers_probe", address)
    except OSError as error:
        raise FailedPrecondition(f"bind {address} to {_DRIVER}: {os_cause(error)}") from error
    return group


def rewrite_env(env: Iterable[str], addresses: Mapping[str, str]) -> list[str]:
    """`env` with the guest's addresses in PCIDEVICE_* variables, in which device plugins write the host's.

    InvalidArgument names a variable with an address that was not passed through. If none was, the variables stay as
    they are.
    """
    env = list(env)
    if not addresses:
        if any(text.startswith(_ENV_PREFIX) for text in env):
            log.warning("variables name devices of the host, and none was passed through")
        return env
    out = []
    for text in env:
        name, equals, value = text.partition("=")
        if equals and name.startswith(_ENV_PREFIX):
            if name.endswith(_ENV_INFO):
                for host, guest in addresses.items():
                    value = value.replace(host, guest)
            elif value:
                value = ",".join(_translated(name, part, addresses) for part in value.split(","))
        out.append(f"{name}{equals}{value}")
    return out


def _translated(name: str, part: str, addresses: Mapping[str, str]) -> str:
    guest = addresses.get(full_address(part.strip()))
    if guest is None:
        raise InvalidArgument(f"rewrite variable {name!r}: host address {part[:80]!r} was not passed through")
    return guest
