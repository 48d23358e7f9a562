"""The QEMU options of the guest's memory: RAM, NUMA nodes, DIMMs and virtio-mem. Pure."""

from collections.abc import Sequence

from msgspec.structs import replace

from hypervisors.qemu.options import Args, Fields, object_args, option
from pyshim.model.host_facts import cpuset_text
from pyshim.model.units import MIB
from pyshim.model.vm import GuestNode, MemoryBacking, MemoryConfig

RAM_ID = "ram0"
VIRTIO_MEM_ID = "virtiomem0"
_VIRTIO_MEM_UNIT_MIB = 4
"""The size of virtio-mem is rounded down to a multiple of this, as in Kata. It is a multiple of every block size that
QEMU chooses, for 4 KiB pages and for 2 MiB huge pages."""


def size(config: MemoryConfig, *, hotplug: bool, pmem_bytes: int) -> Args:
    """-m: the size of RAM, and the room to grow. DIMMs and a pmem image take a slot each, virtio-mem takes none."""
    room_mib = max(config.max_mib - config.boot_mib, 0) if hotplug else 0
    if config.virtio_mem:
        room_mib, slots = virtio_mem_mib(config) if hotplug else 0, 0
    else:
        slots = config.slots if room_mib else 0
    if pmem_bytes:
        room_mib += -(-pmem_bytes // MIB)
        slots += 1
    boot = f"{config.boot_mib}M"
    offers_room = slots or (config.virtio_mem and room_mib)
    return ("-m", option(boot, {"slots": slots, "maxmem": f"{config.boot_mib + room_mib}M"}) if offers_room else boot)


def virtio_mem_mib(config: MemoryConfig) -> int:
    """The size of the virtio-mem device in MiB; 0 without one."""
    room_mib = max(config.max_mib - config.boot_mib, 0) if config.virtio_mem else 0
    return room_mib // _VIRTIO_MEM_UNIT_MIB * _VIRTIO_MEM_UNIT_MIB


def virtio_mem(config: MemoryConfig) -> Args:
    """The virtio-mem device, with no memory plugged. `reserve=off`: the host gives memory only as the guest gets it.

    `prealloc` is set on the device, which touches what it plugs; the backend would touch its whole size at once.
    """
    fields = memory_backend(config, backend_id="virtiomem", size_mib=virtio_mem_mib(config))
    prealloc = fields.pop("prealloc", False)
    backend = object_args({**fields, "size": f"{virtio_mem_mib(config)}M", "reserve": False})
    device: Fields = {"id": VIRTIO_MEM_ID, "memdev": "virtiomem", "requested-size": 0}
    return (*backend, "-device", option("virtio-mem-pci", device | ({"prealloc": True} if prealloc else {})))


def memory_backend(config: MemoryConfig, *, backend_id: str, size_mib: int) -> Fields:
    """Arguments of object-add for a backend of guest RAM; `qom-type` is its kind."""
    kinds: dict[MemoryBacking, Fields] = {
        MemoryBacking.PRIVATE: {"qom-type": "memory-backend-ram"},
        MemoryBacking.SHARED_MEMFD: {"qom-type": "memory-backend-memfd", "share": True},
        # Not mem-path=/dev/hugepages: if that is not a hugetlbfs, QEMU makes an ordinary file of the RAM's size.
        MemoryBacking.HUGEPAGES: {"qom-type": "memory-backend-memfd", "hugetlb": True, "share": True},
    }
    fields: Fields = {**kinds[config.backing], "id": backend_id, "size": size_mib << 20}
    if config.host_nodes:
        # QEMU can prefer one node; for several it has only `bind`, which allows no others.
        policy = "preferred" if len(config.host_nodes) == 1 else "bind"
        fields |= {"host-nodes": list(config.host_nodes), "policy": policy}
    return {**fields, "prealloc": True} if config.prealloc else fields


def ram(config: MemoryConfig) -> Args:
    return _ram(config, RAM_ID, config.boot_mib)


def ram_in_file(config: MemoryConfig, fd: int, *, is_saved: bool) -> Args:
    """RAM in the open file `fd`, which has its size. QEMU opens the file again, by a name that needs no directory.

    `is_saved`: it is a saved machine's file, for several VMs. QEMU only reads it; the guest's writes are private.
    """
    fields: Fields = {"id": RAM_ID, "size": f"{config.boot_mib}M", "mem-path": f"/proc/self/fd/{fd}"}
    fields |= {"share": False, "readonly": True, "rom": False} if is_saved else {"share": True}
    return ("-object", option("memory-backend-file", fields))


def numa(config: MemoryConfig, nodes: Sequence[GuestNode]) -> Args:
    """The guest's NUMA nodes: memory, vCPUs and distances."""
    args: list[str] = []
    for number, node in enumerate(nodes):
        own = replace(config, host_nodes=node.memory_nodes)
        backend_id = f"ram{number}"
        fields: Fields = {"nodeid": number, "memdev": backend_id, "cpus": cpuset_text(node.vcpus).split(",")}
        args += (*_ram(own, backend_id, node.memory_mib), "-numa", option("node", fields))
    for src, node in enumerate(nodes):
        for dst, distance in enumerate(node.distances):
            if src != dst:
                args += ("-numa", option("dist", {"src": src, "dst": dst, "val": distance}))
    return tuple(args)


def _ram(config: MemoryConfig, backend_id: str, size_mib: int) -> Args:
    fields = memory_backend(config, backend_id=backend_id, size_mib=size_mib)
    return object_args({**fields, "size": f"{size_mib}M"})
