"""QMP against scripted peers (silence, garbage, hang-ups, lies) and a real QEMU, and the answers of its commands."""

import asyncio
import os
import shutil
import socket
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import pytest

from hypervisors.qemu.qmp import (
    BURST,
    COMMAND_TIMEOUT_S,
    PAUSE_S,
    UNPLUG_TIMEOUT_S,
    CpuSlot,
    Monitor,
    QmpCommandFailed,
    QmpError,
    QmpEvent,
    QmpGone,
    QmpTimeout,
    Vcpu,
)
from pyshim.host.processes.children import Children
from pyshim.model.errors import ErrorCode, ShimError
from pyshim.model.units import MIB
from tests.fakes.hostile_qmp import MODES
from tests.fakes.qmp_peer import Answer, QmpPeer

from .qmp_session import Session

pytestmark = pytest.mark.usefixtures("fast_clock", "nothing_left")


QEMU = "/usr/bin/qemu-system-x86_64"


@pytest.mark.parametrize(
    ("greeting", "error", "text"),
    [
        pytest.param(b"", QmpTimeout, "greet qemu of 'vm1': no answer within 0.2 s", id="silence"),
        pytest.param(b"SSH-2.0-OpenSSH\r\n", QmpError, "greet qemu of 'vm1': ", id="other-protocol"),
        pytest.param(b'{"QMP": 7}\r\n', QmpError, "greet qemu of 'vm1': ", id="malformed"),
        pytest.param(b"\xff\xfe\x00\r\n", QmpError, "greet qemu of 'vm1': ", id="no-text"),
        pytest.param(
            b'{"QMP": {"version": {}, "capabilities": []}}\r\n', QmpError, "no version in its greeting", id="no-version"
        ),
        pytest.param(
            b'{"QMP": {"version": {"qemu": {"major": 4, "minor": 2, "micro": 1}}, "capabilities": []}}\r\n',
            QmpError,
            r"version 4\.2\.1 is older than 5\.0",
            id="too-old",
        ),
    ],
)
async def test_a_malformed_greeting_is_an_error(greeting: bytes, error: type[Exception], text: str) -> None:
    session = Session(greeting=greeting)

    with pytest.raises(error, match=text):
        await session.monitor.connect(session.peer.client, 0.2)

    await session.monitor.close()
    await session.peer.close()


async def test_a_peer_that_closes_before_the_greeting_is_gone_not_late() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    monitor = Monitor(name="vm1", on_event=lambda _event: None)

    with pytest.raises(QmpGone, match=r"closed by qemu|reset"):
        await monitor.connect(ours, 20)


async def test_a_refused_command_raises_qemus_message_and_its_name() -> None:
    def refuse(peer: QmpPeer, request: dict[str, Any]) -> None:
        peer.refuse(request, "GenericError", "Bus 'pcie.0' does not support hotplugging\x1b[31m")

    async with Session({"device_add": refuse}) as session:
        with pytest.raises(QmpCommandFailed) as caught:
            await session.monitor.device_add("virtio-blk-pci", "d", {})

    assert str(caught.value) == "ask qemu 'device_add': Bus 'pcie.0' does not support hotplugging"
    assert caught.value.error_class == "GenericError"


async def test_silence_is_a_deadline_and_a_late_answer_is_dropped() -> None:
    late: list[dict[str, Any]] = []

    def keep(_peer: QmpPeer, request: dict[str, Any]) -> None:
        late.append(request)

    async with Session({"query-status": keep}) as session:
        with pytest.raises(QmpTimeout, match=r"ask qemu 'query-status': no answer within 0\.1 s") as caught:
            await session.monitor.execute("query-status", timeout_s=0.1)
        session.peer.reply(late[0], {"status": "running"})

        assert await session.monitor.execute("cont") == {}
        assert caught.value.code is ErrorCode.DEADLINE_EXCEEDED


async def test_answers_find_their_commands_in_any_order() -> None:
    held: list[dict[str, Any]] = []

    def hold(peer: QmpPeer, request: dict[str, Any]) -> None:
        held.append(request)
        if len(held) == 3:
            for each in reversed(held):
                peer.reply(each, each["arguments"]["n"])

    async with Session({"x": hold}) as session:
        answers = await asyncio.gather(*(session.monitor.execute("x", {"n": n}) for n in range(3)))

    assert answers == [0, 1, 2]


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(lambda peer: peer.hang_up(), id="hang-up"),
        pytest.param(lambda peer: peer.send(b"}{ this is not json\r\n"), id="garbage"),
        pytest.param(lambda peer: peer.send(b'{"return": "\xff"}\r\n'), id="not-utf-8"),
        pytest.param(lambda peer: peer.send(b'{"a":' * 5000 + b"\r\n"), id="deeply-nested"),
        pytest.param(lambda peer: peer.send(b'{"error": {"class": "GenericError", "desc": "what?"}}\r\n'), id="no-id"),
    ],
)
async def test_the_end_of_a_connection_ends_all_waits_and_is_reported_once(end: Callable[[QmpPeer], None]) -> None:
    async with Session({"x": lambda peer, _request: end(peer)}) as session:
        with session.monitor.expecting(lambda _event: True) as event:
            with pytest.raises(QmpGone, match="ask qemu 'x' of 'vm1': qmp connection"):
                await session.monitor.execute("x")
            reason = await session.monitor.closed()
            with pytest.raises(QmpGone, match="wait for an event"):
                await event

        assert reason
        assert not session.monitor.is_open
        with pytest.raises(QmpGone):
            await session.monitor.cont()


async def test_a_reply_without_a_result_is_an_error_of_the_command() -> None:
    def half(peer: QmpPeer, request: dict[str, Any]) -> None:
        peer.send(b'{"id": "%s"}\r\n' % request["id"].encode())

    async with Session({"cont": half}) as session:
        with pytest.raises(QmpError, match="ask qemu 'cont'"):
            await session.monitor.cont()
        assert session.monitor.is_open


async def test_close_does_not_wait_for_a_peer_that_reads_nothing() -> None:
    ours, theirs = socket.socketpair()
    theirs.send(b'{"QMP": {"version": {"qemu": {"major": 7, "minor": 2, "micro": 0}}, "capabilities": []}}\r\n')
    theirs.send(b'{"return": {}}\r\n')
    monitor = Monitor(name="vm1", on_event=lambda _event: None)
    await monitor.connect(ours, 5)
    stuck = asyncio.create_task(monitor.execute("x", {"big": "x" * 5_000_000}, timeout_s=60))
    await asyncio.sleep(0.05)

    await monitor.close()
    await monitor.close()

    with pytest.raises(QmpGone):
        await stuck
    theirs.close()


async def test_events_come_in_order_and_are_not_stored() -> None:
    async with Session() as session:
        for number in range(1000):
            session.peer.event("RTC_CHANGE", {"offset": number})
        await session.monitor.cont()

        assert [event.data["offset"] for event in session.events] == list(range(1000))
        # The library would keep all of them for ever, in two places.
        listener = session.monitor._client.events
        assert (listener.history, listener.empty()) == ((), True)


@pytest.mark.parametrize(
    "event",
    [
        pytest.param(b'{"event": 7, "data": {}}\r\n', id="name-is-no-text"),
        pytest.param(b'{"event": "SHUTDOWN", "data": [1]}\r\n', id="data-is-no-object"),
    ],
)
async def test_a_malformed_event_is_ignored(event: bytes) -> None:
    async with Session() as session:
        session.peer.send(event)
        await session.monitor.cont()

        assert session.events == []


async def real_qemu(children: Children) -> socket.socket:
    """QMP of a QEMU that has no machine."""
    ours, theirs = socket.socketpair()
    with theirs:
        await children.spawn(
            f"{QEMU} -machine none -nodefaults -display none -S -chardev socket,id=q,fd=3 -mon q,mode=control".split(),
            env={},
            fds={3: theirs.fileno()},
        )
    return ours


@pytest.mark.skipif(shutil.which(QEMU) is None, reason=f"needs {QEMU}")
async def test_real_qemu_answers_takes_descriptors_and_quits(real_clock: None) -> None:
    children = Children()
    events: list[QmpEvent] = []
    monitor = Monitor(name="none", on_event=events.append)
    await monitor.connect(await real_qemu(children), 30)
    null = os.open("/dev/null", os.O_RDWR)

    assert monitor.version[0] >= 5
    assert await monitor.status() == "prelaunch"
    assert await monitor.cpus() == ()
    with pytest.raises(QmpCommandFailed, match="nonsense"):
        await monitor.execute("nonsense")
    # At once: QEMU keeps only the newest unclaimed descriptor, so without the lock one of these fails.
    await asyncio.gather(*(monitor.getfd(f"fd{n}", null) for n in range(8)))
    for n in range(8):
        await monitor.closefd(f"fd{n}")
    with pytest.raises(QmpCommandFailed, match="fd0"):
        await monitor.closefd("fd0")
    await monitor.quit(10)
    assert await monitor.closed()
    await monitor.close()
    (child,) = children.alive or (None,)
    if child is not None:
        await child.wait()
    os.close(null)

    assert children.alive == ()
    assert [event.text("reason") for event in events if event.name == "SHUTDOWN"] == ["host-qmp-quit"]


def deleted(device: str | None) -> Answer:
    def answer(peer: QmpPeer, request: dict[str, Any]) -> None:
        peer.event("DEVICE_DELETED", {"path": "/machine/peripheral/d/virtio-backend"})
        peer.reply(request, {})
        peer.event("DEVICE_DELETED", {"device": device, "path": "/machine/peripheral/d"} if device else {})

    return answer


def unplug_error(peer: QmpPeer, request: dict[str, Any]) -> None:
    peer.reply(request, {})
    peer.event("DEVICE_UNPLUG_GUEST_ERROR", {"device": "d", "path": "/machine/peripheral/d"})


async def test_device_remove_waits_for_the_event_with_the_devices_own_id() -> None:
    async with Session({"device_del": deleted("d")}) as session:
        await session.monitor.device_remove("d")

        assert [event.name for event in session.events] == ["DEVICE_DELETED"] * 2


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        pytest.param(deleted("other"), QmpTimeout, "unplug 'd': the guest did not let go", id="another-device"),
        pytest.param(unplug_error, QmpError, "unplug 'd': the guest refused", id="guest-refuses"),
    ],
)
async def test_device_remove_fails_as_the_guest_does(answer: Answer, error: type[Exception], text: str) -> None:
    async with Session({"device_del": answer}) as session:
        with pytest.raises(error, match=text):
            await session.monitor.device_remove("d", timeout_s=0.2)


async def test_device_remove_of_a_device_already_gone_is_done() -> None:
    def unknown(peer: QmpPeer, request: dict[str, Any]) -> None:
        peer.refuse(request, "DeviceNotFound", "Device 'd' not found")

    async with Session({"device_del": unknown}) as session:
        await session.monitor.device_remove("d")


async def test_a_repeated_device_remove_waits_for_the_first() -> None:
    def pending(peer: QmpPeer, request: dict[str, Any]) -> None:
        peer.refuse(request, "GenericError", "Device d is already in the process of unplug")
        asyncio.get_running_loop().call_later(1, peer.event, "DEVICE_DELETED", {"device": "d"})

    async with Session({"device_del": pending}) as session:
        await session.monitor.device_remove("d")

        assert [event.name for event in session.events] == ["DEVICE_DELETED"]


def value(answer: object) -> Answer:
    return lambda peer, request: peer.reply(request, answer)


async def test_qemus_answers_become_values() -> None:
    answers = {
        "query-status": value({"status": "paused", "running": False}),
        "query-cpus-fast": value([{"cpu-index": 1, "thread-id": 22}, {"cpu-index": 0, "thread-id": 11}]),
        "query-hotpluggable-cpus": value(
            [
                {"type": "max-x86_64-cpu", "vcpus-count": 1, "props": {"socket-id": 1, "core-id": 0}},
                {"type": "max-x86_64-cpu", "qom-path": "/cpu[0]", "props": {"socket-id": 0, "core-id": 0}},
            ]
        ),
        "query-memory-size-summary": value({"base-memory": 1024, "plugged-memory": 512}),
        "query-memory-devices": value(
            [
                {"type": "nvdimm", "data": {"slot": 0, "addr": 4096, "size": 96}},
                {"type": "dimm", "data": {"slot": 3, "addr": 8192, "size": 416}},
                {"type": "virtio-mem", "data": {"memaddr": 16384, "size": 0}},
            ]
        ),
    }

    async with Session(answers) as session:
        monitor = session.monitor
        assert await monitor.status() == "paused"
        assert await monitor.cpus() == (Vcpu(0, 11), Vcpu(1, 22))
        assert await monitor.cpu_slots() == (
            CpuSlot("max-x86_64-cpu", {"socket-id": 0, "core-id": 0}, "/cpu[0]"),
            CpuSlot("max-x86_64-cpu", {"socket-id": 1, "core-id": 0}, ""),
        )
        assert await monitor.memory_size() == (1024, 416)
        assert await monitor.memory_modules() == ((0, 4096, 96, True), (3, 8192, 416, False))


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ({"x": "\x1b[31m"}, r"its answer lacks the text 'status': \{\"x\": \"\\u001b\[31m\"\}$"),
        ([1] * 1000, "has no object where one belongs: .{200}$"),
    ],
    ids=["short", "long"],
)
async def test_an_answer_of_another_shape_is_quoted(answer: object, error: str) -> None:
    async with Session({"query-status": value(answer)}) as session:
        with pytest.raises(QmpError, match=error):
            await session.monitor.status()


MEMORY_BYTES = 64 * MIB
EVENTS = 2000
CALLS: Mapping[str, Callable[[Monitor], Any]] = {
    "cont": Monitor.cont,
    "status": Monitor.status,
    "cpus": Monitor.cpus,
    "cpu slots": Monitor.cpu_slots,
    "memory size": Monitor.memory_size,
    "memory modules": Monitor.memory_modules,
    "property": lambda monitor: monitor.qom_get("/machine", "x"),
    "plug": lambda monitor: monitor.device_add("virtio-blk-pci", "d", {}),
    "unplug": lambda monitor: monitor.device_remove("d"),
}


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.parametrize("mode", MODES)
async def test_malformed_messages_of_qemu_delay_no_command(mode: str) -> None:
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
