"""Typed commands of the QMP layer: answers, answers of another shape, and devices that leave."""

import asyncio
from typing import Any

import pytest

from hypervisors.qemu.qmp import CpuSlot, QmpError, QmpTimeout, Vcpu
from tests.fakes.qmp_peer import Answer, QmpPeer

from .qmp_session import Session

pytestmark = pytest.mark.usefixtures("fast_clock", "nothing_left")


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


async def test_device_remove_asked_again_waits_on() -> None:
    def pending(peer: QmpPeer, request: dict[str, Any]) -> None:
        peer.refuse(request, "GenericError", "Device d is already in the process of unplug")
        asyncio.get_running_loop().call_later(1, peer.event, "DEVICE_DELETED", {"device": "d"})

    async with Session({"device_del": pending}) as session:
        await session.monitor.device_remove("d")

        assert [event.name for event in session.events] == ["DEVICE_DELETED"]


def value(answer: object) -> Answer:
    return lambda peer, request: peer.reply(request, answer)


async def test_typed_answers() -> None:
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
        "query-memory-devices": value([{"type": "dimm", "data": {"slot": 3}}]),
    }

    async with Session(answers) as session:
        monitor = session.monitor
        assert await monitor.status() == "paused"
        assert await monitor.cpus() == (Vcpu(0, 11), Vcpu(1, 22))
        assert await monitor.cpu_slots() == (
            CpuSlot("max-x86_64-cpu", {"socket-id": 0, "core-id": 0}, "/cpu[0]"),
            CpuSlot("max-x86_64-cpu", {"socket-id": 1, "core-id": 0}, ""),
        )
        assert await monitor.memory_size() == (1024, 512)
        assert await monitor.dimm_slots() == {3}


@pytest.mark.parametrize("lie", [None, 7, [7], {"x": 1}, [{"cpu-index": "0", "thread-id": True}]])
async def test_an_answer_of_another_shape_is_an_error_not_a_crash(lie: object) -> None:
    names = ("query-status", "query-cpus-fast", "query-hotpluggable-cpus", "query-memory-size-summary")
    async with Session(dict.fromkeys(names, value(lie))) as session:
        monitor = session.monitor
        for ask in (monitor.status, monitor.cpus, monitor.cpu_slots, monitor.memory_size):
            with pytest.raises(QmpError, match="ask qemu 'query-"):
                await ask()


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
