"""The commands that plug a disk, one that a program serves among them, and what is done when one fails."""

import asyncio
import fcntl
import os
import socket
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from hypervisors.qemu import disks
from hypervisors.qemu.disks import Disks, VhostUserDisks
from hypervisors.qemu.hotplug import Hotplug
from hypervisors.qemu.qmp import QmpCommandFailed, QmpTimeout
from integration.framework.loop_devices import loop_device
from pyshim.model.errors import DeadlineExceeded, FailedPrecondition, ShimError, Unavailable
from pyshim.model.vm import (
    BlockDevice,
    DiskAio,
    DiskBus,
    DiskCache,
    EmulatedDevice,
    GuestLocation,
    MemoryBacking,
    PciLayout,
    PortKind,
    ScsiController,
    VhostUserBackend,
)
from tests.fakes.disks import disk
from tests.fakes.unix_sockets import crowded
from tests.fakes.vm_config import vm_config
from tests.grammar.check import Grammar, tables


def test_a_block_node_has_the_settings_of_the_host_file() -> None:
    volume = disk(
        "d", "/dev/vg/lv", read_only=True, discard=True, cache=DiskCache(direct=True, no_flush=True), aio=DiskAio.NATIVE
    )

    assert disks.file_node(volume, fdset=3, is_block_special=True, aio=volume.tuning.aio) == {
        "driver": "raw",
        "node-name": "d",
        "read-only": True,
        "cache": {"direct": True, "no-flush": True},
        "discard": "unmap",
        "file": {
            "driver": "host_device",
            "filename": "/dev/fdset/3",
            "read-only": True,
            "aio": "native",
            "cache": {"direct": True, "no-flush": True},
            "discard": "unmap",
        },
    }


def test_settings_that_are_not_given_are_left_out() -> None:
    plain = disk("d", "/f")

    assert disks.file_node(plain, fdset=3, is_block_special=False, aio=DiskAio.THREADS)["discard"] == "ignore"
    assert disks.virtio_blk(plain) == {"drive": "d", "share-rw": True, "romfile": ""}
    assert disks.scsi_controller(ScsiController(queues=0, queue_size=0, iothread="")) == (
        "-device",
        "virtio-scsi-pci,id=virtio-scsi0,romfile=",
    )


def test_every_setting_reaches_its_property() -> None:
    volume = disk(
        "d",
        "/f",
        discard=True,
        serial="a-serial-number-of-more-than-20-characters",
        iothread="one",
        queues=2,
        queue_size=64,
        logical_block_bytes=512,
        physical_block_bytes=4096,
    )

    assert disks.virtio_blk(volume) == {
        "drive": "d",
        "share-rw": True,
        "romfile": "",
        "num-queues": 2,
        "queue-size": 64,
        "iothread": "iothread-one",
        "discard": True,
        "logical_block_size": 512,
        "physical_block_size": 4096,
        "serial": "a-serial-number-of-m",
    }
    assert disks.scsi_controller(ScsiController(queues=2, queue_size=64, iothread="one")) == (
        "-object",
        "iothread,id=iothread-one",
        "-device",
        "virtio-scsi-pci,id=virtio-scsi0,romfile=,num_queues=2,virtqueue_size=64,iothread=iothread-one",
    )


@pytest.mark.parametrize(("index", "address"), [(0, "0:0"), (255, "0:255"), (256, "1:0"), (65535, "255:255")])
def test_scsi_addresses_count_through_luns_first(index: int, address: str) -> None:
    fields = disks.scsi_disk(disk("d", "/f", serial="s"), index)

    assert disks.scsi_address(index) == address == f"{fields['scsi-id']}:{fields['lun']}"
    assert (fields["bus"], fields["serial"]) == ("virtio-scsi0.0", "s")


def test_a_directory_is_no_disk(tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match="neither a file nor a block device"):
        asyncio.run(disks_of(Monitor()).plug(disk("d", tmp_path)))


@pytest.mark.root
@pytest.mark.parametrize("read_only", [False, True])
def test_a_disk_that_the_host_has_mounted_is_refused_and_named(tmp_path: Path, read_only: bool) -> None:
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(8 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
    with loop_device(image) as device:
        wanted = replace(disk("d", device), read_only=read_only)
        asyncio.run(disks_of(Monitor()).plug(wanted))
        (tmp_path / "point").mkdir()
        subprocess.run(["mount", device, tmp_path / "point"], check=True)
        try:
            with pytest.raises(FailedPrecondition, match=f"'{device}': EBUSY .the host has mounted"):
                asyncio.run(disks_of(Monitor()).plug(wanted))
        finally:
            subprocess.run(["umount", tmp_path / "point"], check=True)


class Monitor:
    """Writes down the commands; `refuse` names those that fail."""

    version = (7, 2, 0)
    error: Exception = QmpCommandFailed("command", "GenericError", "no")

    def __init__(self, *refuse: str) -> None:
        self.said: list[tuple[str, Any]] = []
        self.refuse = list(refuse)

    def _say(self, command: str, value: object) -> None:
        self.said.append((command, value))
        if command in self.refuse:
            self.refuse.remove(command)
            raise self.error

    async def object_add(self, fields: Mapping[str, object]) -> None:
        self._say("object_add", fields["id"])

    async def add_fd(self, fd: int) -> int:
        self._say("add_fd", fcntl.fcntl(fd, fcntl.F_GETFL) & (os.O_ACCMODE | os.O_DIRECT))
        return 5

    async def remove_fd(self, fdset: int) -> None:
        self._say("remove_fd", fdset)

    async def blockdev_add(self, node: Mapping[str, Any]) -> None:
        self._say("blockdev_add", node["file"]["aio"])

    async def blockdev_del(self, name: str) -> None:
        self._say("blockdev_del", name)

    async def device_add(self, driver: str, device_id: str, _fields: Mapping[str, object]) -> None:
        self._say("device_add", (driver, device_id))

    async def chardev_add(self, fields: Mapping[str, object]) -> None:
        self._say("chardev_add", fields["id"])

    async def chardev_remove(self, name: str) -> None:
        self._say("chardev_remove", name)

    async def device_remove(self, device_id: str) -> None:
        self._say("device_remove", device_id)

    async def plug(self, driver: str, device_id: str, _fields: Mapping[str, object]) -> GuestLocation:
        self._say("plug", (driver, device_id))
        return GuestLocation(pci_path="02/01")

    def free(self, device_id: str) -> None:
        self._say("free", device_id)

    async def locate(self, _qdev: str) -> GuestLocation:
        return GuestLocation(pci_path="07")


def disks_of(monitor: Monitor) -> Disks:
    return Disks(monitor, monitor)  # type: ignore[arg-type]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An empty file to plug."""
    file = tmp_path / "file"
    file.touch()
    return file


def test_without_io_uring_disks_use_threads_and_it_is_tried_once(path: Path) -> None:
    monitor = Monitor("blockdev_add")
    plugged = disks_of(monitor)

    asyncio.run(plugged.plug(disk("a", path, aio=DiskAio.IO_URING)))
    asyncio.run(plugged.plug(disk("b", path, aio=DiskAio.IO_URING)))

    assert [value for name, value in monitor.said if name == "blockdev_add"] == ["io_uring", "threads", "threads"]


def test_only_io_uring_is_replaced_by_threads(path: Path) -> None:
    monitor = Monitor("blockdev_add")

    with pytest.raises(QmpCommandFailed):
        asyncio.run(disks_of(monitor).plug(disk("a", path, aio=DiskAio.NATIVE)))

    assert monitor.said[-1] == ("remove_fd", 5)


@pytest.mark.parametrize("read_only", [True, False])
@pytest.mark.parametrize("direct", [True, False])
async def test_a_disk_is_opened_for_qemu_and_closed_with_its_node(path: Path, read_only: bool, direct: bool) -> None:
    """As QEMU 10 asks for it: a descriptor with another mode is no candidate."""
    monitor = Monitor()
    plugged = disks_of(monitor)
    volume = disk("a", path, read_only=read_only, cache=DiskCache(direct=direct, no_flush=False))
    mode = (os.O_RDONLY if read_only else os.O_RDWR) | (os.O_DIRECT if direct else 0)

    await plugged.plug(volume)
    await plugged.unplug(volume)

    assert monitor.said[0] == ("add_fd", mode)
    assert monitor.said[-2:] == [("blockdev_del", "a"), ("remove_fd", 5)]


@pytest.mark.parametrize(("bus", "failing"), [(DiskBus.VIRTIO_BLK, "plug"), (DiskBus.VIRTIO_SCSI, "device_add")])
def test_a_disk_that_cannot_be_plugged_leaves_no_node(path: Path, bus: DiskBus, failing: str) -> None:
    monitor = Monitor(failing)
    plugged = disks_of(monitor)

    with pytest.raises(QmpCommandFailed):
        asyncio.run(plugged.plug(disk("a", path, bus=bus, iothread="one")))

    assert monitor.said[0] == ("object_add", "iothread-one")
    assert monitor.said[-2:] == [("blockdev_del", "a"), ("remove_fd", 5)]
    assert plugged.saved() == {}


async def test_a_freed_scsi_address_is_given_again(path: Path) -> None:
    monitor = Monitor()
    plugged = disks_of(monitor)

    named = [disk(name, path, bus=DiskBus.VIRTIO_SCSI) for name in ("a", "b", "c")]
    given = [(await plugged.plug(each)).scsi_address for each in named[:2]]
    await plugged.unplug(named[0])
    given.append((await plugged.plug(named[2])).scsi_address)

    assert given == ["0:0", "0:1", "0:0"]
    assert plugged.saved() == {"0": "c", "1": "b"}


SERVED = disk("d", "/store/block/sockets/d", queues=2, queue_size=64, vhost_user=VhostUserBackend(reconnect_s=0))


@pytest.mark.parametrize(
    ("version", "reconnect_s", "said"),
    [
        ((7, 2, 0), 0, {}),
        ((11, 1, 0), 0, {}),
        ((8, 2, 9), 3, {"reconnect": 3}),
        ((9, 1, 9), 3, {"reconnect": 3}),
        ((9, 2, 0), 3, {"reconnect-ms": 3000}),
        ((10, 2, 0), 3, {"reconnect-ms": 3000}),
    ],
)
def test_the_reconnect_time_is_in_the_versions_property(
    version: tuple[int, ...], reconnect_s: int, said: dict[str, int]
) -> None:
    served = replace(SERVED, vhost_user=VhostUserBackend(reconnect_s=reconnect_s))

    assert disks.vhost_user_chardev(served, version) == {
        "id": "char-d",
        "backend": {
            "type": "socket",
            "data": {"addr": {"type": "unix", "data": {"path": "/store/block/sockets/d"}}, "server": False, **said},
        },
    }
    assert set(said) <= set(known_to(version).options["chardev"]), "the argv's option is QMP's member"


def known_to(version: tuple[int, ...]) -> Grammar:
    """The oldest table from `version` on, so that a word that goes is missed."""
    known = [one for name, one in tables().items() if tuple(map(int, name.split("."))) >= version[:2]]
    return known[0] if known else tables()["11.1"]


@pytest.mark.parametrize("version", list(tables()))
def test_every_version_accepts_a_vhost_user_disk(version: str) -> None:
    fields = disks.vhost_user_blk(SERVED)

    assert fields == {"chardev": "char-d", "num-queues": 2, "queue-size": 64}
    assert set(fields) <= tables()[version].devices["vhost-user-blk-pci"]


class Bridge(Monitor):
    """A monitor that writes down the slots; a device may go on hanging there."""

    def __init__(self, *refuse: str) -> None:
        super().__init__(*refuse)
        self.slots: list[object] = []

    async def device_add(
        self, driver: str, device_id: str, fields: Mapping[str, object], _timeout_s: float = 0
    ) -> None:
        self.slots.append(fields["addr"])
        self._say("device_add", (driver, device_id))

    async def qom_get(self, _path: str, name: str) -> object:
        return 8 if name == "addr" else "/machine/pcie.0"


@pytest.mark.parametrize(
    ("error", "slots"),
    [
        (QmpTimeout("ask qemu 'device_add': no answer within 10 s"), ["0x1", "0x2"]),
        (QmpCommandFailed("device_add", "GenericError", "no"), ["0x1", "0x1"]),
    ],
)
async def test_a_slot_is_free_again_only_after_qemus_refusal(error: Exception, slots: list[str], path: Path) -> None:
    """A device whose plug was given up may be there later, and a slot takes one."""
    monitor = Bridge("device_add")
    monitor.error = error

    config = vm_config()
    shared = replace(config.memory, backing=MemoryBacking.SHARED_MEMFD)
    plugged = Hotplug(replace(config, memory=shared, bridges=1), monitor)  # type: ignore[arg-type]
    with pytest.raises((DeadlineExceeded, QmpCommandFailed)):
        await plugged.plug(replace(SERVED, vhost_user=VhostUserBackend(reconnect_s=1)))
    await plugged.plug(disk("e", path))

    assert monitor.slots == slots


@pytest.mark.parametrize(
    ("refused", "slots"),
    [(("device_add", "device_remove"), ["0x1", "0x2"]), (("device_add",), ["0x1", "0x1"])],
    ids=["never-plugged", "gone"],
)
async def test_the_slot_of_a_passed_through_device_is_free_again_once_it_is_removed(
    refused: tuple[str, ...], slots: list[str], path: Path
) -> None:
    monitor = Bridge(*refused)
    monitor.error = QmpTimeout("ask qemu: no answer within 120 s")

    config = replace(vm_config(), bridges=1, pci=PciLayout(hot_plug=PortKind.BRIDGE))
    plugged = Hotplug(config, monitor)  # type: ignore[arg-type]
    with pytest.raises(QmpTimeout):
        await plugged.plug(EmulatedDevice(id="toy", model="edu"))
    await plugged.plug(disk("e", path))

    assert monitor.slots == slots


TIMEOUT = QmpTimeout("ask qemu: no answer within 10 s")
REFUSAL = QmpCommandFailed("command", "GenericError", "no")
WAIT_S = 60.0
PLUGGED = [("getfd", "char-d"), ("chardev_add", "char-d"), ("plug", "d")]
TAKEN_BACK = [("device_remove", "virtio-d"), ("chardev_remove", "char-d"), ("free", "d")]


class Qemu:
    """Writes down the commands, and keeps a copy of each descriptor; `fails` says how often which one fails first."""

    version = (7, 2, 0)

    def __init__(self, fails: Mapping[str, list[ShimError]] | None = None) -> None:
        self.said: list[tuple[str, str]] = []
        self.fds: list[int] = []
        self._fails = dict(fails or {})

    def _say(self, command: str, value: str) -> None:
        self.said.append((command, value))
        if errors := self._fails.get(command):
            raise errors.pop(0)

    async def getfd(self, name: str, fd: int) -> None:
        self.fds.append(os.dup(fd))
        self._say("getfd", name)

    async def closefd(self, name: str) -> None:
        self._say("closefd", name)

    async def chardev_add(self, fields: Mapping[str, Any]) -> None:
        self._say("chardev_add", fields["id"])

    async def chardev_remove(self, name: str) -> None:
        self._say("chardev_remove", name)

    async def device_remove(self, name: str) -> None:
        self._say("device_remove", name)

    async def plug(
        self, _driver: str, device_id: str, _fields: Mapping[str, object], _timeout_s: float
    ) -> GuestLocation:
        self._say("plug", device_id)
        return GuestLocation(pci_path="02/01")

    def free(self, device_id: str) -> None:
        self._say("free", device_id)

    def disks(self) -> VhostUserDisks:
        return VhostUserDisks(self, self)  # type: ignore[arg-type]


@pytest.fixture
def program(tmp_path: Path) -> Iterator[socket.socket]:
    """A listener that never says a word."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "program"))
        listener.listen()
        listener.settimeout(WAIT_S)
        yield listener


def served(program: socket.socket, *, reconnect_s: int = 0) -> BlockDevice:
    return disk("d", program.getsockname(), vhost_user=VhostUserBackend(reconnect_s=reconnect_s))


def test_a_vhost_user_disk_is_connected_plugged_and_unplugged(program: socket.socket) -> None:
    qemu = Qemu()
    disks = qemu.disks()

    asyncio.run(disks.plug(served(program)))
    asyncio.run(disks.unplug(served(program)))

    assert qemu.said == [*PLUGGED, *TAKEN_BACK[:2]]
    connection, _ = program.accept()
    with connection:
        connection.settimeout(WAIT_S)
        os.close(qemu.fds[0])
        assert connection.recv(1) == b"", "qemu's copy is the only one"


def test_a_qemu_that_may_reconnect_connects_by_itself(program: socket.socket) -> None:
    qemu = Qemu()

    asyncio.run(qemu.disks().plug(served(program, reconnect_s=1)))

    assert qemu.said == PLUGGED[1:]


def test_a_program_that_does_not_answer_is_disconnected_and_may_be_tried_again(program: socket.socket) -> None:
    """QEMU does nothing else while it waits, and it waits until the connection ends."""
    qemu = Qemu({"plug": [TIMEOUT]})
    disks = qemu.disks()

    with pytest.raises(DeadlineExceeded, match=r"plug 'd': the program at '.*/program' does not answer"):
        asyncio.run(disks.plug(served(program)))

    assert qemu.said == [*PLUGGED, *TAKEN_BACK]
    with socket.socket(fileno=qemu.fds[0]) as held:
        held.settimeout(WAIT_S)
        assert held.recv(1) == b"", "the copy qemu waits at has ended"
    qemu.said.clear()
    asyncio.run(disks.plug(served(program)))
    assert qemu.said == PLUGGED


@pytest.mark.parametrize("reconnect_s", [0, 1])
def test_a_disk_that_qemu_still_has_cannot_be_plugged(program: socket.socket, reconnect_s: int) -> None:
    qemu = Qemu({"plug": [TIMEOUT], "device_remove": [TIMEOUT] * (1 if reconnect_s else 2)})
    disks, wanted = qemu.disks(), served(program, reconnect_s=reconnect_s)
    with pytest.raises(DeadlineExceeded):
        asyncio.run(disks.plug(wanted))

    with pytest.raises(Unavailable, match=r"plug 'd': qemu still has it .* program at '.*/program' did not answer"):
        asyncio.run(disks.plug(wanted))

    qemu.said.clear()
    asyncio.run(disks.plug(wanted))
    assert qemu.said == [*TAKEN_BACK, *(PLUGGED[1:] if reconnect_s else PLUGGED)]


@pytest.mark.parametrize(
    ("failing", "kind", "rest"),
    [
        ("chardev_add", Unavailable, [*PLUGGED[:2], ("closefd", "char-d")]),
        ("plug", QmpCommandFailed, [*PLUGGED, ("chardev_remove", "char-d")]),
    ],
)
def test_a_vhost_user_disk_that_cannot_be_plugged_leaves_nothing(
    program: socket.socket, failing: str, kind: type[Exception], rest: list[tuple[str, str]]
) -> None:
    qemu = Qemu({failing: [REFUSAL]})

    with pytest.raises(kind):
        asyncio.run(qemu.disks().plug(served(program)))

    assert qemu.said == rest


@pytest.mark.parametrize("who", ["absent", "full"])
def test_an_unreachable_program_is_an_error_before_any_command(tmp_path: Path, who: str) -> None:
    path = str(tmp_path / who)
    absent = replace(disk("d", path), vhost_user=VhostUserBackend(reconnect_s=0))
    qemu = Qemu()

    def plug() -> None:
        with pytest.raises(Unavailable, match=rf"plug 'd': connect to '{path}': "):
            asyncio.run(qemu.disks().plug(absent))

    if who == "absent":
        plug()
    else:
        with crowded(path):
            plug()

    assert qemu.said == []
