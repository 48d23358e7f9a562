"""Disks that a program serves: what is said to QEMU, and what is left of a program that is away, silent or late."""

import asyncio
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from hypervisors.qemu.qmp import QmpCommandFailed, QmpTimeout
from hypervisors.qemu.vhost_user import VhostUserDisks
from pyshim.model.errors import DeadlineExceeded, ShimError, Unavailable
from pyshim.model.vm import BlockDevice, GuestLocation, VhostUserBackend
from tests.fakes.disks import disk
from tests.fakes.unix_sockets import crowded

TIMEOUT = QmpTimeout("ask qemu: no answer within 10 s")
REFUSAL = QmpCommandFailed("command", "GenericError", "no")
WAIT_S = 60.0
PLUGGED = [("give_fd", "char-d"), ("chardev_add", "char-d"), ("behind_bridge", "d")]
TAKEN_BACK = [("device_remove", "virtio-d"), ("chardev_remove", "char-d"), ("free_slot", "d")]


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

    async def give_fd(self, name: str, fd: int) -> None:
        self.fds.append(os.dup(fd))
        self._say("give_fd", name)

    async def drop_fd(self, name: str) -> None:
        self._say("drop_fd", name)

    async def chardev_add(self, fields: Mapping[str, Any]) -> None:
        self._say("chardev_add", fields["id"])

    async def chardev_remove(self, name: str) -> None:
        self._say("chardev_remove", name)

    async def device_remove(self, name: str) -> None:
        self._say("device_remove", name)

    async def behind_bridge(
        self, _driver: str, device_id: str, _fields: Mapping[str, object], _timeout_s: float
    ) -> GuestLocation:
        self._say("behind_bridge", device_id)
        return GuestLocation(pci_path="02/01")

    def free_slot(self, device_id: str) -> None:
        self._say("free_slot", device_id)

    def disks(self) -> VhostUserDisks:
        return VhostUserDisks(self, self.behind_bridge, self.free_slot)  # type: ignore[arg-type]


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


def test_a_served_disk_is_reached_then_plugged_and_back(program: socket.socket) -> None:
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


def test_where_qemu_is_to_connect_again_it_connects_itself(program: socket.socket) -> None:
    qemu = Qemu()

    asyncio.run(qemu.disks().plug(served(program, reconnect_s=1)))

    assert qemu.said == PLUGGED[1:]


def test_a_program_that_does_not_answer_is_hung_up_on_and_can_be_tried_again(program: socket.socket) -> None:
    """QEMU does nothing else while it waits, and it waits until the connection ends."""
    qemu = Qemu({"behind_bridge": [TIMEOUT]})
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
def test_a_disk_that_qemu_still_holds_is_named_until_it_lets_go(program: socket.socket, reconnect_s: int) -> None:
    qemu = Qemu({"behind_bridge": [TIMEOUT], "device_remove": [TIMEOUT] * (1 if reconnect_s else 2)})
    disks, wanted = qemu.disks(), served(program, reconnect_s=reconnect_s)
    with pytest.raises(DeadlineExceeded):
        asyncio.run(disks.plug(wanted))

    with pytest.raises(Unavailable, match=r"plug 'd': qemu still holds it .* program at '.*/program' did not answer"):
        asyncio.run(disks.plug(wanted))

    qemu.said.clear()
    asyncio.run(disks.plug(wanted))
    assert qemu.said == [*TAKEN_BACK, *(PLUGGED[1:] if reconnect_s else PLUGGED)]


@pytest.mark.parametrize(
    ("failing", "kind", "rest"),
    [
        ("chardev_add", Unavailable, [*PLUGGED[:2], ("drop_fd", "char-d")]),
        ("behind_bridge", QmpCommandFailed, [*PLUGGED, ("chardev_remove", "char-d")]),
    ],
)
def test_a_served_disk_that_cannot_be_plugged_leaves_nothing(
    program: socket.socket, failing: str, kind: type[Exception], rest: list[tuple[str, str]]
) -> None:
    qemu = Qemu({failing: [REFUSAL]})

    with pytest.raises(kind):
        asyncio.run(qemu.disks().plug(served(program)))

    assert qemu.said == rest


@pytest.mark.parametrize("who", ["absent", "full"])
def test_a_program_that_cannot_be_reached_is_named_and_qemu_not_asked(tmp_path: Path, who: str) -> None:
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
