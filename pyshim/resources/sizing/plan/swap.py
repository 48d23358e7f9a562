"""Swap space in the guest: how much the containers of a VM ask for, and the disk that gives it. Pure.

A container asks with `memory.swappiness` above 0, in its OCI resources or by an annotation. Its share is what
`memory.swap` (memory and swap together) has beyond the limit; without `memory.swap` it is as much as the limit, and
without a limit as much as the VM's own memory. Source: the rules of Kata's Go runtime, which adds up only the shares
without `memory.swap`; here all are added up.
"""

from collections.abc import Iterable, Mapping
from struct import pack
from typing import Any

from msgspec.structs import replace

from pyshim.model.config import SWAP_IN_BYTES_ANNOTATION, SWAPPINESS_ANNOTATION, Config
from pyshim.model.errors import InvalidArgument
from pyshim.model.units import MIB
from pyshim.model.vm import BlockDevice, DiskBus
from pyshim.resources.sizing.plan.workload import swap_request
from pyshim.resources.volumes.plan.disks import disk

MAX_SWAPPINESS = 200
"""Source: Linux 5.8 and later, Documentation/admin-guide/sysctl/vm.rst, "swappiness"."""
_ANNOTATIONS = (
    (SWAPPINESS_ANNOTATION, "swappiness", MAX_SWAPPINESS),
    (SWAP_IN_BYTES_ANNOTATION, "swap", (1 << 63) - 1),
)
_MAGIC = b"SWAPSPACE2"
_PAGE_BYTES = 4096
_LEAST_PAGES = 10
"""Source: mkswap(8); the kernel refuses an area of one page."""
Resources = Mapping[str, Any]


def with_swap(resources: Resources, annotations: Mapping[str, str]) -> Resources:
    """`resources` with the container's annotations for swap. Raises InvalidArgument naming the annotation."""
    asked = {
        member: _whole(annotations[name], name, most) for name, member, most in _ANNOTATIONS if name in annotations
    }
    return {**resources, "memory": {**(resources.get("memory") or {}), **asked}} if asked else resources


def swap_bytes(containers: Iterable[Resources], default_memory_mib: int) -> int:
    """The sum of the containers' requests, 0 without any. Raises InvalidArgument naming a member that is wrong."""
    total = 0
    for resources in containers:
        limit, together, swappiness = swap_request(resources)
        if swappiness <= 0:
            continue
        if together:
            total += max(0, together - limit)
        else:
            total += limit or default_memory_mib * MIB
    return total


def swap_directory(config: Config, sandbox_id: str) -> str:
    """The directory of the sandbox's swap files."""
    return f"{config.hypervisor.guest_swap_path}/{sandbox_id}"


def swap_disk(config: Config, sandbox_id: str, number: int) -> BlockDevice:
    """The disk over the sandbox's swap file of that number. virtio-blk whatever the volumes' driver is: AddSwap names
    a PCI path.
    """
    name = f"swap{number}"
    path = f"{swap_directory(config, sandbox_id)}/{name}"
    device = disk(config, device_id=name, path=path, read_only=False)
    return replace(device, iothread="", tuning=replace(device.tuning, bus=DiskBus.VIRTIO_BLK))


def swap_file_bytes(wanted_bytes: int) -> int:
    """The size of the file that gives `wanted_bytes` of swap space: whole pages, and one for the header."""
    return (max(-(-wanted_bytes // _PAGE_BYTES), _LEAST_PAGES) + 1) * _PAGE_BYTES


def swap_header(file_bytes: int) -> bytes:
    """The first page of a swap file of that size. Source: Linux, include/linux/swap.h, `union swap_header`."""
    version, bad_pages, last_page = 1, 0, file_bytes // _PAGE_BYTES - 1
    start = bytes(1024) + pack("<III", version, last_page, bad_pages)
    return start.ljust(_PAGE_BYTES - len(_MAGIC), b"\0") + _MAGIC


def _whole(text: str, name: str, most: int) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > len(str(most)) or int(text) > most:
        raise InvalidArgument(f"read annotation '{name}': not a whole number up to {most}: {text[:100]!r}")
    return int(text)
