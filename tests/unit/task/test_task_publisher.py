"""The publisher against a containerd that dies and returns: a real ttrpc server on a real socket."""

import asyncio
import logging
import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct

from protos.containerd import events_pb2 as pb
from protos.containerd.events_ttrpc_pb2 import ForwardRequest
from protos.containerd.types_pb2 import Envelope
from pyshim.model import task
from pyshim.model.ids import ContainerId, ExecId, HostPath
from pyshim.model.task import CreateTask, ExitStatus, RootfsMount, Stdio
from pyshim.task.publisher import EventPublisher, PublisherLimits
from pyshim.task.translate_events import forward_request
from pyshim.ttrpc import CallContext, Code, Server, TtrpcError
from tests.fakes.unix_sockets import crowded

pytestmark = pytest.mark.usefixtures("fast_clock")


C1 = ContainerId("c1")
E1 = ExecId("e1")
EXIT = ExitStatus(status=7, exited_at_ns=5_000_000_006)
EXITED = task.TaskExited(container_id=C1, process_id="c1", pid=9, exit=EXIT)
LIMITS = PublisherLimits(queued_events=8, call_timeout_s=10, first_pause_s=0.001, longest_pause_s=0.01)


class Containerd:
    """containerd's event intake on the socket `path`; can be taken down and brought back."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.envelopes: list[Envelope] = []
        self.namespaces: list[str | None] = []
        self.arrived = asyncio.Event()
        self.entered = asyncio.Event()
        self.refuse: dict[str, Code] = {}
        self.hold: asyncio.Event | None = None
        self._server: Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def up(self) -> None:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self.path))
        listener.listen()
        self._server = Server(services={"containerd.services.events.ttrpc.v1.Events": {"Forward": self._forward}})
        self._serving = asyncio.create_task(self._server.serve(listener))

    async def down(self) -> None:
        if self._server is not None and self._serving is not None:
            await self._server.shutdown(grace_s=0)
            await self._serving
            self.path.unlink()
        self._server = None

    async def took(self, count: int) -> list[str]:
        """Topics, once there are `count`."""
        async with asyncio.timeout(30):
            while len(self.envelopes) < count:
                self.arrived.clear()
                await self.arrived.wait()
        return [envelope.topic for envelope in self.envelopes]

    async def _forward(self, payload: bytes, call: CallContext) -> bytes:
        envelope = ForwardRequest.FromString(payload).envelope
        self.entered.set()
        if self.hold is not None:
            await self.hold.wait()
        if envelope.topic in self.refuse:
            raise TtrpcError(self.refuse[envelope.topic], "no")
        self.envelopes.append(envelope)
        self.namespaces.append(dict(call.metadata).get("containerd-namespace-ttrpc"))
        self.arrived.set()
        return b""


@asynccontextmanager
async def bench(limits: PublisherLimits = LIMITS) -> AsyncIterator[tuple[EventPublisher, Containerd]]:
    with tempfile.TemporaryDirectory(prefix="events-") as directory:
        containerd = Containerd(Path(directory) / "s.ttrpc")
        publisher = EventPublisher(
            address=str(containerd.path), namespace="k8s.io", limits=limits, clock_ns=lambda: 1_000_000_002
        )
        task = asyncio.create_task(publisher.run())
        try:
            yield publisher, containerd
            assert not task.done()
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            await containerd.down()


def started(pid: int) -> task.TaskStarted:
    return task.TaskStarted(container_id=C1, pid=pid)


async def test_events_arrive_in_order_with_namespace_and_time() -> None:
    async with bench() as (publisher, containerd):
        await containerd.up()
        publisher.publish(started(1))
        publisher.publish(EXITED)

        assert await publisher.flush(timeout_s=30)

        assert [envelope.topic for envelope in containerd.envelopes] == ["/tasks/start", "/tasks/exit"]
        envelope = containerd.envelopes[0]
        assert (envelope.namespace, envelope.timestamp.ToNanoseconds()) == ("k8s.io", 1_000_000_002)
        assert envelope.event.type_url == "containerd.events.TaskStart"
        assert containerd.namespaces == ["k8s.io", "k8s.io"]


async def test_without_an_address_events_are_dropped_at_once() -> None:
    """CRI-O takes none: the end of a shim must not wait for a caller of events."""

    publisher = EventPublisher(address="", namespace="default")

    publisher.publish(EXITED)

    assert publisher.queued == 0
    assert await publisher.flush(timeout_s=0)


async def test_events_wait_for_containerd_and_keep_their_order() -> None:
    async with bench() as (publisher, containerd):
        for pid in range(1, 6):
            publisher.publish(started(pid))
        assert not await publisher.flush(timeout_s=0.05)
        assert publisher.queued == 5

        await containerd.up()

        assert await publisher.flush(timeout_s=30)
        pids = [pb.TaskStart.FromString(envelope.event.value).pid for envelope in containerd.envelopes]
        assert pids == [1, 2, 3, 4, 5]


async def test_event_whose_call_broke_is_sent_again_to_the_next_containerd() -> None:
    async with bench() as (publisher, containerd):
        containerd.hold = asyncio.Event()
        await containerd.up()
        publisher.publish(started(1))
        publisher.publish(EXITED)
        await containerd.entered.wait()
        await containerd.down()
        assert containerd.envelopes == []

        containerd.hold = None
        await containerd.up()

        assert await containerd.took(2) == ["/tasks/start", "/tasks/exit"]


async def test_connection_is_made_anew_after_a_restart_between_events() -> None:
    async with bench() as (publisher, containerd):
        await containerd.up()
        publisher.publish(started(1))
        await containerd.took(1)
        await containerd.down()
        await containerd.up()

        publisher.publish(EXITED)

        assert await containerd.took(2) == ["/tasks/start", "/tasks/exit"]


async def test_containerd_that_does_not_answer_is_asked_again_after_the_timeout() -> None:
    async with bench(LIMITS._replace(call_timeout_s=0.05)) as (publisher, containerd):
        containerd.hold = asyncio.Event()
        await containerd.up()
        publisher.publish(EXITED)
        assert not await publisher.flush(timeout_s=0.2)

        containerd.hold.set()
        containerd.hold = None

        assert await publisher.flush(timeout_s=30)


async def test_full_queue_drops_new_events_with_a_warning_but_never_an_exit(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        async with bench() as (publisher, containerd):
            for pid in range(1, 11):
                publisher.publish(started(pid))
            publisher.publish(EXITED)
            publisher.publish(task.TaskDeleted(container_id=C1, pid=9, exit=EXIT))
            publisher.publish(EXITED)

            await containerd.up()

            assert await publisher.flush(timeout_s=30)
            assert [envelope.topic for envelope in containerd.envelopes] == ["/tasks/start"] * 8 + ["/tasks/exit"] * 2

    dropped = [record for record in caplog.records if record.message.startswith("event dropped")]
    assert [record.event for record in dropped] == ["TaskStarted", "TaskStarted", "TaskDeleted"]  # type: ignore[attr-defined]


async def test_event_that_containerd_refuses_does_not_delay_the_others(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        async with bench() as (publisher, containerd):
            containerd.refuse = {"/tasks/oom": Code.INVALID_ARGUMENT}
            await containerd.up()
            publisher.publish(task.TaskOom(container_id=C1))
            publisher.publish(EXITED)

            assert await containerd.took(1) == ["/tasks/exit"]

    assert [record.message for record in caplog.records] == ["event refused by containerd"]


@pytest.mark.parametrize("pid", [-1, "many", 0.5], ids=repr)
async def test_event_that_cannot_be_encoded_does_not_delay_the_others(pid: Any) -> None:
    """The sender's end would be the shim's, and so the pod's."""

    async with bench() as (publisher, containerd):
        await containerd.up()
        publisher.publish(started(pid))
        publisher.publish(EXITED)

        assert await containerd.took(1) == ["/tasks/exit"]


@pytest.mark.parametrize(
    "answer",
    [b"\xff" * 64, b"HTTP/1.1 200 OK\r\n\r\n", b"\0\0\0\x04\0\0\0\x01\x02\0\xff\xff\xff\xff", b""],
    ids=["noise", "http", "no response message", "end"],
)
async def test_an_answer_that_is_none_does_not_end_the_sender(answer: bytes) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        met.set()
        writer.write(answer)
        await writer.drain()
        writer.close()

    met = asyncio.Event()

    async with bench() as (publisher, containerd):
        babbler = await asyncio.start_unix_server(talk, containerd.path)
        publisher.publish(EXITED)
        await asyncio.wait_for(met.wait(), 30)
        babbler.close()
        containerd.path.unlink(missing_ok=True)  # Python 3.13 does it in close()
        await containerd.up()

        assert await containerd.took(1) == ["/tasks/exit"]


async def test_transient_error_of_containerd_is_retried() -> None:
    async with bench() as (publisher, containerd):
        containerd.refuse = {"/tasks/exit": Code.UNAVAILABLE}
        await containerd.up()
        publisher.publish(EXITED)
        assert not await publisher.flush(timeout_s=0.05)

        containerd.refuse = {}

        assert await publisher.flush(timeout_s=30)


async def test_publish_needs_neither_containerd_nor_a_running_sender() -> None:
    publisher = EventPublisher(address="unix:///nonexistent/s", namespace="n", limits=LIMITS)

    publisher.publish(EXITED)

    assert publisher.queued == 1
    assert not await publisher.flush(timeout_s=0)


CREATE = CreateTask(
    container_id=C1,
    bundle=HostPath("/b"),
    rootfs=(RootfsMount(type="overlay", source="o", target="", options=("lowerdir=/l",)),),
    stdio=Stdio(stdin="/i", stdout="/o", stderr="/e", terminal=True),
    options=None,
)


def expected_create() -> pb.TaskCreate:
    message = pb.TaskCreate(
        container_id="c1", bundle="/b", pid=9, io=pb.TaskIO(stdin="/i", stdout="/o", stderr="/e", terminal=True)
    )
    message.rootfs.add(type="overlay", source="o", options=["lowerdir=/l"])
    return message


def with_exit(message: Any) -> Message:
    message.exited_at.seconds, message.exited_at.nanos = 5, 6
    result: Message = message
    return result


@pytest.mark.parametrize(
    ("event", "topic", "message"),
    [
        (task.TaskCreated(container_id=C1, request=CREATE, pid=9), "/tasks/create", expected_create()),
        (started(9), "/tasks/start", pb.TaskStart(container_id="c1", pid=9)),
        (EXITED, "/tasks/exit", with_exit(pb.TaskExit(container_id="c1", id="c1", pid=9, exit_status=7))),
        (
            task.TaskExited(container_id=C1, process_id="e1", pid=9, exit=EXIT),
            "/tasks/exit",
            with_exit(pb.TaskExit(container_id="c1", id="e1", pid=9, exit_status=7)),
        ),
        (
            task.TaskDeleted(container_id=C1, pid=9, exit=EXIT),
            "/tasks/delete",
            with_exit(pb.TaskDelete(container_id="c1", pid=9, exit_status=7)),
        ),
        (
            task.ExecAdded(container_id=C1, exec_id=E1),
            "/tasks/exec-added",
            pb.TaskExecAdded(container_id="c1", exec_id="e1"),
        ),
        (
            task.ExecStarted(container_id=C1, exec_id=E1, pid=9),
            "/tasks/exec-started",
            pb.TaskExecStarted(container_id="c1", exec_id="e1", pid=9),
        ),
        (task.TaskPaused(container_id=C1), "/tasks/paused", pb.TaskPaused(container_id="c1")),
        (task.TaskResumed(container_id=C1), "/tasks/resumed", pb.TaskResumed(container_id="c1")),
        (task.TaskOom(container_id=C1), "/tasks/oom", pb.TaskOOM(container_id="c1")),
        (
            task.RemoteVmLost(container_id=C1),
            "/pyshim/remote-vm-lost",
            json_format.ParseDict({"remote_vm": "c1"}, Struct()),
        ),
    ],
)
def test_event_has_its_topic_and_its_message(event: task.TaskEvent, topic: str, message: Message) -> None:
    envelope = ForwardRequest.FromString(forward_request(event, namespace="n", at_ns=1)).envelope

    assert envelope.topic == topic
    assert envelope.event.type_url == message.DESCRIPTOR.full_name
    assert type(message).FromString(envelope.event.value) == message


async def test_a_containerd_too_busy_to_accept_is_waited_for_as_for_any_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(tmp_path / "s")

    with crowded(path):
        publisher = EventPublisher(address=path, namespace="ns", limits=LIMITS)
        publisher.publish(EXITED)
        running = asyncio.create_task(publisher.run())
        await asyncio.sleep(0.2)
        running.cancel()
        await asyncio.wait([running])

    assert caplog.messages == []
