"""A QEMU that lies, in every mode of `tests/fakes/hostile_qmp.py`: each command ends in time, and memory is bounded.

`tests/unit/failpoints/test_hostile_qmp_peer.py` has the same modes against the whole shim.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import pytest

from hypervisors.qemu.qmp import COMMAND_TIMEOUT_S, UNPLUG_TIMEOUT_S, Monitor, QmpEvent
from hypervisors.qemu.qmp_client import BURST, PAUSE_S
from pyshim.model.errors import ShimError
from pyshim.model.units import MIB
from tests.fakes.hostile_qmp import MODES

from .qmp_session import Session

pytestmark = pytest.mark.usefixtures("fast_clock", "nothing_left")


MEMORY_BYTES = 64 * MIB
EVENTS = 2000
CALLS: Mapping[str, Callable[[Monitor], Any]] = {
    "cont": Monitor.cont,
    "status": Monitor.status,
    "cpus": Monitor.cpus,
    "cpu slots": Monitor.cpu_slots,
    "memory size": Monitor.memory_size,
    "dimm slots": Monitor.dimm_slots,
    "property": lambda monitor: monitor.qom_get("/machine", "x"),
    "plug": lambda monitor: monitor.device_add("virtio-blk-pci", "d", {}),
    "unplug": lambda monitor: monitor.device_remove("d"),
}


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.parametrize("mode", MODES)
async def test_a_qemu_that_lies_holds_up_no_command(mode: str) -> None:
    held, loop = resident_bytes(), asyncio.get_running_loop()
    commands = ("cont", "query-status", "query-cpus-fast", "query-hotpluggable-cpus", "query-memory-size-summary")
    more = ("query-memory-devices", "qom-get", "device_add", "device_del")
    session = Session(dict.fromkeys((*commands, *more), MODES[mode]))
    async with session:
        for call in CALLS.values():
            began = loop.time()
            with suppress(ShimError):
                await call(session.monitor)
            assert loop.time() - began <= COMMAND_TIMEOUT_S + UNPLUG_TIMEOUT_S
    assert resident_bytes() - held < MEMORY_BYTES


async def test_a_flood_of_events_leaves_loop_and_cpu_to_others() -> None:
    turns, events_of_turn, over = 0, Counter[int](), asyncio.Event()

    def count(_event: QmpEvent) -> None:
        events_of_turn[turns] += 1
        if events_of_turn.total() == EVENTS:
            over.set()

    async with Session() as session:
        session.monitor._on_event = count
        session.peer.send(b'{"event": "X"}\r\n' * EVENTS)
        while events_of_turn.total() < BURST - 1:  # the clock stands still while the loop turns
            turns += 1
            await asyncio.sleep(0)
        assert max(events_of_turn.values()) <= 2
        await over.wait()
        took_s = asyncio.get_running_loop().time()
    assert took_s > (EVENTS // BURST - 1) * PAUSE_S
