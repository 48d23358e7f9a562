"""Resizing as a conversation with QEMU: what is asked in which order, and what a guest that does not follow leads to.

Scripted peers: taking vCPUs away is not for emulation (QEMU 7.2 dies of it), and a guest that refuses is hard to find.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from hypervisors.qemu.hotplug import Hotplug
from hypervisors.qemu.memory import resize_virtio_mem
from hypervisors.qemu.qmp import QmpError
from pyshim.model.errors import DeadlineExceeded, ResourceExhausted
from pyshim.model.host_facts import Accelerator
from pyshim.model.vm import ImageDriver
from tests.fakes.disks import disk
from tests.fakes.qmp_peer import Answer, QmpPeer
from tests.fakes.vm_config import vm_config

from .qmp_session import Session

pytestmark = pytest.mark.usefixtures("fast_clock", "nothing_left")


KVM = replace(vm_config().cpu, accelerator=Accelerator.KVM, model="host", max_vcpus=4)
VIRTIO_MEM = replace(vm_config().memory, virtio_mem=True)
Command = tuple[str, dict[str, Any]]


class Machine:
    """QEMU's side: CPU sockets, and a virtio-mem device whose guest plugs and unplugs by `follow`."""

    def __init__(self, follow: Callable[["Machine", int], int] = lambda _machine, wanted: wanted) -> None:
        self.cpus = {0: "cpu0"}
        self.size_mib = 0
        self.requested_mib: list[int] = []
        self.stuck_cpu = ""
        self._follow = follow
        self.answers: dict[str, Answer] = {
            "query-hotpluggable-cpus": self._sockets,
            "device_add": self._add,
            "device_del": self._delete,
            "qom-get": lambda peer, request: peer.reply(request, self.size_mib << 20),
            "qom-set": self._request,
            "query-memory-size-summary": lambda peer, request: peer.reply(
                request, {"base-memory": 256 << 20, "plugged-memory": self.size_mib << 20}
            ),
            "query-memory-devices": lambda peer, request: peer.reply(request, []),
        }

    def _sockets(self, peer: QmpPeer, request: dict[str, Any]) -> None:
        sockets = [{"type": "host-x86_64-cpu", "vcpus-count": 1, "props": {"socket-id": n}} for n in range(4)]
        peer.reply(
            request,
            [
                {**s, "qom-path": f"/machine/peripheral/{self.cpus[n]}"} if n in self.cpus else s
                for n, s in enumerate(sockets)
            ],
        )

    def _add(self, peer: QmpPeer, request: dict[str, Any]) -> None:
        self.cpus[request["arguments"]["socket-id"]] = request["arguments"]["id"]
        peer.reply(request, {})

    def _delete(self, peer: QmpPeer, request: dict[str, Any]) -> None:
        cpu_id = request["arguments"]["id"]
        peer.reply(request, {})
        if cpu_id == self.stuck_cpu:
            peer.event("DEVICE_UNPLUG_GUEST_ERROR", {"device": cpu_id, "path": f"/machine/peripheral/{cpu_id}"})
            return
        self.cpus = {number: name for number, name in self.cpus.items() if name != cpu_id}
        peer.event("DEVICE_DELETED", {"device": cpu_id, "path": f"/machine/peripheral/{cpu_id}"})

    def _request(self, peer: QmpPeer, request: dict[str, Any]) -> None:
        arguments = request["arguments"]
        assert (arguments["path"], arguments["property"]) == ("/machine/peripheral/virtiomem0", "requested-size")
        self.requested_mib.append(arguments["value"] >> 20)
        peer.reply(request, {})
        before, self.size_mib = self.size_mib, self._follow(self, self.requested_mib[-1])
        if self.size_mib != before:
            size = {"id": "virtiomem0", "size": self.size_mib << 20, "qom-path": arguments["path"]}
            peer.event("MEMORY_DEVICE_SIZE_CHANGE", size)


def asked(session: Session, *names: str) -> list[Command]:
    return [(r["execute"], r.get("arguments", {})) for r in session.peer.requests if r["execute"] in names]


async def test_vcpus_are_removed_newest_first_once_released_and_not_below_boot() -> None:
    machine = Machine()
    async with Session(machine.answers) as session:
        plugged = Hotplug(vm_config(cpu=KVM), session.monitor)

        assert await plugged.resize_vcpus(4) == 4
        assert await plugged.resize_vcpus(2) == 2
        assert await plugged.resize_vcpus(1) == 1
        assert await plugged.resize_vcpus(3) == 3

        added = [arguments["id"] for name, arguments in asked(session, "device_add")]
        removed = [arguments["id"] for name, arguments in asked(session, "device_del")]
        assert added == ["cpu-1", "cpu-2", "cpu-3", "cpu-1", "cpu-2"]
        assert removed == ["cpu-3", "cpu-2", "cpu-1"]
        assert machine.cpus == {0: "cpu0", 1: "cpu-1", 2: "cpu-2"}


async def test_a_vcpu_the_guest_does_not_release_is_an_error_and_still_counts() -> None:
    machine = Machine()
    async with Session(machine.answers) as session:
        plugged = Hotplug(vm_config(cpu=KVM), session.monitor)
        await plugged.resize_vcpus(4)
        machine.stuck_cpu = "cpu-2"

        with pytest.raises(QmpError, match="unplug 'cpu-2': the guest refused"):
            await plugged.resize_vcpus(1)

        assert [cpu["ID"] for cpu in plugged.saved()["HotpluggedVCPUs"]] == ["cpu-1", "cpu-2"]  # type: ignore[attr-defined]
        machine.stuck_cpu = ""
        assert await plugged.resize_vcpus(1) == 1


async def test_a_vcpu_the_guest_releases_late_is_no_longer_counted() -> None:
    machine = Machine()
    async with Session(machine.answers) as session:
        plugged = Hotplug(vm_config(cpu=KVM), session.monitor)
        await plugged.resize_vcpus(3)
        machine.stuck_cpu = "cpu-2"
        with pytest.raises(QmpError):
            await plugged.resize_vcpus(2)
        machine.stuck_cpu = ""
        del machine.cpus[2]

        assert await plugged.resize_vcpus(3) == 3

        assert machine.cpus == {0: "cpu0", 1: "cpu-1", 2: "cpu-2"}


async def test_a_disk_the_guest_does_not_release_delays_no_other_change(tmp_path: Path, real_clock: None) -> None:
    machine = Machine()
    delete = machine.answers["device_del"]
    deleting = asyncio.Event()

    def keep_disks(peer: QmpPeer, request: dict[str, Any]) -> None:
        if request["arguments"]["id"].startswith("cpu-"):
            delete(peer, request)
        else:
            peer.reply(request, {})
            deleting.set()

    def add(peer: QmpPeer, request: dict[str, Any]) -> None:
        if "socket-id" in request["arguments"]:
            machine._add(peer, request)
        else:
            peer.reply(request, {})

    def get(peer: QmpPeer, request: dict[str, Any]) -> None:
        places = {"addr": 1 << 3, "parent_bus": "/machine/q35/pcie.0"}
        peer.reply(request, places.get(request["arguments"]["property"], machine.size_mib << 20))

    def take(peer: QmpPeer, request: dict[str, Any]) -> None:
        peer.reply(request, {"fdset-id": 1, "fd": 9})

    machine.answers |= {"device_del": keep_disks, "device_add": add, "qom-get": get, "add-fd": take}
    (tmp_path / "disk").touch()
    async with Session(machine.answers) as session:
        plugged = Hotplug(vm_config(cpu=KVM, memory=VIRTIO_MEM), session.monitor)
        await plugged.plug(disk("one", tmp_path / "disk"))
        keeping = asyncio.ensure_future(plugged.unplug("one"))
        await deleting.wait()

        assert await plugged.resize_vcpus(2) == 2
        assert await plugged.resize_memory(512) == 512
        await plugged.plug(disk("two", tmp_path / "disk"))

        assert not keeping.done()
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


async def test_virtio_mem_grows_and_shrinks_by_whole_blocks() -> None:
    machine = Machine()
    async with Session(machine.answers) as session:
        plugged = Hotplug(vm_config(memory=VIRTIO_MEM), session.monitor)

        assert await plugged.resize_memory(300) == 384
        assert await plugged.resize_memory(1024) == 1024
        assert await plugged.resize_memory(500) == 512
        assert await plugged.resize_memory(512) == 512
        assert await plugged.resize_memory(100) == 256
        with pytest.raises(ResourceExhausted, match="over its 1024 MiB"):
            await plugged.resize_memory(1025)

        assert machine.requested_mib == [128, 768, 256, 0]
        assert plugged.saved()["HotpluggedMemory"] == 0


async def test_a_guest_that_plugs_in_steps_is_waited_for() -> None:
    def halfway(machine: Machine, wanted: int) -> int:
        return machine.size_mib + (wanted - machine.size_mib) // 2

    machine = Machine(halfway)

    def size(peer: QmpPeer, request: dict[str, Any]) -> None:
        """The guest takes the rest only after it was asked how far it is."""
        peer.reply(request, machine.size_mib << 20)
        if machine.requested_mib and machine.size_mib != machine.requested_mib[-1]:
            machine.size_mib = machine.requested_mib[-1]
            peer.event("MEMORY_DEVICE_SIZE_CHANGE", {"id": "virtiomem0", "size": machine.size_mib << 20})

    async with Session({**machine.answers, "qom-get": size}) as session:
        assert await resize_virtio_mem(session.monitor, 512) == 512
        assert machine.requested_mib == [512]


@pytest.mark.parametrize(("image_mib", "places_mib"), [(104, (4224, 4352)), (128, (4224, 4352)), (0, (None, 4352))])
async def test_a_dimm_begins_at_a_whole_memory_block(image_mib: int, places_mib: tuple[int | None, ...]) -> None:
    modules: list[dict[str, Any]] = []

    def module(kind: str, start_mib: int, size_mib: int) -> None:
        place = {"slot": len(modules), "addr": start_mib << 20, "size": size_mib << 20}
        modules.append({"type": kind, "data": place})

    if image_mib:
        module("nvdimm", 4096, image_mib)
    machine = Machine()
    machine.answers |= {
        "query-memory-devices": lambda peer, request: peer.reply(request, modules),
        "object-add": lambda peer, request: peer.reply(request, {}),
        "device_add": lambda peer, request: peer.reply(request, {}),
    }
    boot = replace(vm_config().boot, image_driver=ImageDriver.PMEM) if image_mib else vm_config().boot
    async with Session(machine.answers) as session:
        plugged = Hotplug(vm_config(boot=boot), session.monitor)

        assert await plugged.resize_memory(384) == 384
        module("dimm", 4224, 128)
        machine.size_mib = 128 + image_mib
        assert await plugged.resize_memory(512) == 512

        added = [arguments.get("addr") for name, arguments in asked(session, "device_add")]
    assert added == [place and place << 20 for place in places_mib]


async def test_a_guest_that_plugs_too_little_is_an_error_and_its_size_is_then_requested() -> None:
    machine = Machine(lambda _machine, wanted: min(wanted, 64))
    async with Session(machine.answers) as session:
        with pytest.raises(DeadlineExceeded, match="by 512 MiB of virtio-mem: it took 64 MiB and then nothing"):
            await resize_virtio_mem(session.monitor, 512, 0.05)

        assert machine.requested_mib == [512, 64]


async def test_memory_that_the_guest_does_not_return_stays_in_the_device() -> None:
    machine = Machine(lambda _machine, wanted: max(wanted, 300))
    async with Session(machine.answers) as session:
        machine.size_mib = 768

        assert await resize_virtio_mem(session.monitor, 128, 0.05) == 300
        assert machine.requested_mib == [128, 300]


@pytest.mark.parametrize("lie", ["a lot", -1, None, True, [1]], ids=str)
async def test_a_size_that_is_no_number_is_an_error(lie: object) -> None:
    async with Session({"qom-get": lambda peer, request: peer.reply(request, lie)}) as session:
        with pytest.raises(QmpError, match="virtiomem0"):
            await resize_virtio_mem(session.monitor, 128)
