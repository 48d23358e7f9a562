"""Maps VFIO's device nodes to functions of this host, and functions to drivers. `sys` is sysfs's mount point."""

import os
import re
from collections.abc import Callable, Iterable

from pyshim.host.os_errors import os_errors
from pyshim.model.devices import IOMMUFD_DIR, VFIO_DIR, HostFunction, VfioNode
from pyshim.model.errors import FailedPrecondition, InvalidArgument, NotFound

DRIVER = "vfio-pci"
_BRIDGES = ("0x0600", "0x0604")
"""Classes of host bridges and PCI bridges, which stay with the host although they are in a group."""
_NETWORK = "0x02"
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


Write = Callable[[str, str], None]
"""(file of sysfs, text)."""


def write_file(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def vfio_node(path: str, *, sys: str = "/sys") -> VfioNode:
    """The functions behind `path`, all of them bound to VFIO.

    Raises NotFound for a missing group or function, FailedPrecondition naming each function with another driver: a
    group is passed through as a whole.
    """
    name = path.rpartition("/")[2]
    if path == f"{IOMMUFD_DIR}{name}" and re.fullmatch(r"vfio[0-9]{1,9}", name):
        addresses = [_function_of(name, path, sys)]
    elif path == f"{VFIO_DIR}{name}" and re.fullmatch(r"[0-9]{1,9}", name):
        addresses = _group(name, path, sys)
    else:
        hint = " (hint: without an IOMMU nothing can be passed through)" if name.startswith("noiommu-") else ""
        raise InvalidArgument(f"use '{path}': it is neither {VFIO_DIR}N nor {IOMMUFD_DIR}vfioN{hint}")
    functions = [_facts(address, sys) for address in addresses]
    usable = tuple(each for each in functions if not each.class_code.startswith(_BRIDGES))
    _check_drivers(path, usable, sys)
    if not usable:
        raise FailedPrecondition(f"use '{path}': nothing but bridges is in it")
    return VfioNode(path=path, functions=usable)


def _group(number: str, path: str, sys: str) -> list[str]:
    try:
        names = sorted(os.listdir(f"{sys}/kernel/iommu_groups/{number}/devices"))
    except OSError as error:
        raise NotFound(f"use '{path}': this host has no IOMMU group {number}") from error
    return [name for name in names if _ADDRESS.fullmatch(name)]


def _function_of(name: str, path: str, sys: str) -> str:
    try:
        address = os.path.basename(os.readlink(f"{sys}/class/vfio-dev/{name}/device"))
    except OSError as error:
        raise NotFound(f"use '{path}': this host has no VFIO device {name!r}") from error
    if not _ADDRESS.fullmatch(address):
        raise FailedPrecondition(f"use '{path}': {address!r} is not a PCI function")
    return address


def _facts(address: str, sys: str) -> HostFunction:
    def text(name: str) -> str:
        path = f"{sys}/bus/pci/devices/{address}/{name}"
        with os_errors(f"look at PCI function {address}", NotFound), open(path, encoding="ascii") as file:
            return file.read(64).strip()

    try:
        numa_node = int(text("numa_node"))
    except (NotFound, ValueError):  # a kernel without NUMA shows no such file
        numa_node = -1
    return HostFunction(
        address=address,
        vendor=text("vendor"),
        device=text("device"),
        class_code=text("class"),
        numa_node=numa_node,
    )


def node_of(address: str, *, iommufd: bool, sys: str = "/sys") -> str:
    """The path of the node through which a VMM opens the function: its own with `iommufd`, else its IOMMU group's.

    Raises NotFound for a function that is not there, FailedPrecondition for one without such a node.
    """
    folder = f"{sys}/bus/pci/devices/{address}"
    if not _ADDRESS.fullmatch(address) or not os.path.isdir(folder):
        raise NotFound(f"use PCI function {address}: this host has none")
    if not iommufd:
        try:
            return f"{VFIO_DIR}{os.path.basename(os.readlink(f'{folder}/iommu_group'))}"
        except OSError as error:
            raise FailedPrecondition(f"use PCI function {address}: it is in no IOMMU group") from error
    try:
        names = os.listdir(f"{folder}/vfio-dev")
    except OSError as error:
        raise FailedPrecondition(f"use PCI function {address}: VFIO has no node of its own for it") from error
    return f"{IOMMUFD_DIR}{min(names, default='')}"


def check_beside(address: str, *, sys: str = "/sys") -> None:
    """VFIO has all other functions of the IOMMU group. Raises FailedPrecondition naming the driver that has one."""
    path = node_of(address, iommufd=False, sys=sys)
    others = [_facts(each, sys) for each in _group(path.rpartition("/")[2], path, sys) if each != address]
    _check_drivers(path, [each for each in others if not each.class_code.startswith(_BRIDGES)], sys)


def check_network_function(address: str, *, sys: str = "/sys") -> None:
    """Raises FailedPrecondition unless it is a network card: other functions may carry the host's disks."""
    class_code = _facts(address, sys).class_code
    if not class_code.startswith(_NETWORK):
        raise FailedPrecondition(f"take PCI function {address}: it is not a network card (class {class_code})")


def driver_of(address: str, *, sys: str = "/sys") -> str:
    """The name of the function's driver; empty when it has none."""
    try:
        return os.path.basename(os.readlink(f"{sys}/bus/pci/devices/{address}/driver"))
    except OSError:
        return ""


def is_vfio(driver: str) -> bool:
    """A function of this driver is VFIO's; variants carry it in their names: mlx5_vfio_pci, nvgrace-gpu-vfio-pci."""
    return "vfio" in driver


def _check_drivers(path: str, functions: Iterable[HostFunction], sys: str) -> None:
    found = {each.address: driver_of(each.address, sys=sys) for each in functions}
    wrong = [f"{address} by {name or 'no driver'}" for address, name in found.items() if not is_vfio(name)]
    if wrong:
        raise FailedPrecondition(f"use '{path}': not all of it is held by {DRIVER}: {', '.join(wrong)}")


def bind(address: str, *, sys: str = "/sys", write: Write = write_file) -> str:
    """VFIO's driver has the function. Returns its driver before, empty for none. Raises FailedPrecondition.

    Undone by `rebind`, also when this was interrupted. Source, for both: the kernel's
    Documentation/ABI/testing/sysfs-bus-pci, driver_override.
    """
    former = driver_of(address, sys=sys)
    if former == DRIVER:
        return former
    folder = f"{sys}/bus/pci/devices/{address}"
    doing = f"bind {address} to {DRIVER!r}"
    with os_errors(doing):
        write(f"{folder}/driver_override", DRIVER)
        if former:
            write(f"{folder}/driver/unbind", address)
        write(f"{sys}/bus/pci/drivers_probe", address)
    now = driver_of(address, sys=sys)
    if now != DRIVER:
        hint = "" if os.path.isdir(f"{sys}/bus/pci/drivers/{DRIVER}") else f" (hint: modprobe {DRIVER})"
        raise FailedPrecondition(f"{doing}: {now or 'no driver'!r} has it after all{hint}")
    return former


def rebind(address: str, driver: str, override: str = "", *, sys: str = "/sys", write: Write = write_file) -> None:
    """The function has `driver` and `override` again, or none for an empty name, as before `bind`. Idempotent.

    A function that has another driver by now, or has left the machine, is left alone. Raises FailedPrecondition when
    the function ends up without its driver.
    """
    folder = f"{sys}/bus/pci/devices/{address}"
    if not os.path.isdir(folder) or driver == DRIVER:
        return
    doing = f"bind {address} to {driver or 'no driver'!r}"
    with os_errors(doing):
        if override_of(address, sys=sys) == DRIVER:
            write(f"{folder}/driver_override", override or "\n")  # an empty line takes it away
        # After the override is gone, no other process can bind the function to VFIO any more.
        now = driver_of(address, sys=sys)
        if now == DRIVER:
            write(f"{folder}/driver/unbind", address)
        if driver and now in (DRIVER, ""):
            write(f"{sys}/bus/pci/drivers_probe", address)
    now = driver_of(address, sys=sys)
    if driver and now in (DRIVER, ""):
        raise FailedPrecondition(f"{doing}: {f'{now} has kept it' if now else 'no driver took it'}")


def override_of(address: str, *, sys: str = "/sys") -> str:
    """The driver that alone may take the function; empty when any matching driver may."""
    try:
        with open(f"{sys}/bus/pci/devices/{address}/driver_override", encoding="ascii") as file:
            text = file.read(64).strip()
    except FileNotFoundError:  # it is leaving the machine
        return ""
    return "" if text == "(null)" else text
