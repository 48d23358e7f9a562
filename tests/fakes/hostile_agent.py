"""A guest agent that lies. Its modes are data: each says what becomes of one request, in place of the honest reply.

The peer is written on the protocol core, below the server of `pyshim.ttrpc`, so that a mode can send any bytes.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping

from protos.agent import agent_pb2 as pb
from pyshim.model.units import KIB, MIB
from pyshim.ttrpc.connection import RequestReceived, ServerConnection
from pyshim.ttrpc.framing import DATA, HEADER, MAX_MESSAGE_BYTES, REQUEST, RESPONSE
from pyshim.ttrpc.messages import encode_error, encode_response
from pyshim.ttrpc.session import CallContext
from pyshim.ttrpc.status import Code, TtrpcError
from tests.fakes.agent import FakeAgent


class Call:
    """One request, and the ways to answer it."""

    def __init__(self, agent: "HostileAgent", sock: socket.socket, event: RequestReceived) -> None:
        self.agent = agent
        self.method = event.method
        self.stream_id = event.stream_id
        self.payload = event.payload
        self.timeout_s = event.timeout_ns / 1e9
        """0 for a call without a deadline."""
        self._sock = sock

    async def honest(self) -> bytes:
        """The encoded Response an honest agent gives."""
        try:
            reply = await self.agent.answer(self.method, self.payload)
        except TtrpcError as exc:
            return b"".join(encode_error(exc.code, exc.message))
        return b"".join(encode_response(reply))

    async def send(self, body: bytes, *, stream_id: int | None = None, kind: int = RESPONSE) -> None:
        """A frame with this body, on the request's stream unless another one is given."""
        await self.send_bytes(frame(body, self.stream_id if stream_id is None else stream_id, kind))

    async def send_payload(self, payload: bytes) -> None:
        await self.send(b"".join(encode_response(payload)))

    async def send_bytes(self, data: bytes) -> None:
        async with self.agent.sending:
            await asyncio.get_running_loop().sock_sendall(self._sock, data)


def frame(body: bytes, stream_id: int, kind: int = RESPONSE) -> bytes:
    return HEADER.pack(len(body), stream_id, kind, 0) + body


Mode = Callable[[Call], Awaitable[None]]


class HostileAgent(FakeAgent):
    """`mode` answers every request that comes from now on."""

    def __init__(self) -> None:
        super().__init__()
        self.mode: Mode = honest
        self.sending = asyncio.Lock()
        self._answering: set[asyncio.Task[None]] = set()

    async def answer(self, method: str, payload: bytes) -> bytes:
        reply: bytes = await self._handler(method)(payload, CallContext("", method, 1, (), None, None))
        return reply

    def connection(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        for sock in (ours, theirs):
            sock.setblocking(False)
        self._served.append(theirs)
        self._spawn(self._serve(theirs))
        return ours

    async def close(self) -> None:
        for task in tuple(self._answering):
            task.cancel()
        await asyncio.gather(*self._answering, return_exceptions=True)
        await super().close()

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._answering.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._answering.discard(task)
        if not task.cancelled() and not isinstance(task.exception(), OSError | None):
            raise AssertionError("the hostile agent itself failed") from task.exception()

    async def _serve(self, sock: socket.socket) -> None:
        core = ServerConnection()
        while data := await asyncio.get_running_loop().sock_recv(sock, 256 * KIB):
            for event in core.receive_data(data):
                if isinstance(event, RequestReceived):
                    self._spawn(self.mode(Call(self, sock, event)))


# ---- modes


async def honest(call: Call) -> None:
    await call.send(await call.honest())


async def silent(call: Call) -> None:
    """Nothing is answered."""


def only(*methods: str, mode: Mode) -> Mode:
    """`mode` for these methods, honesty for the others."""

    async def answer(call: Call) -> None:
        await (mode if call.method in methods else honest)(call)

    return answer


def late(seconds: float) -> Mode:
    async def answer(call: Call) -> None:
        body = await call.honest()
        await asyncio.sleep(seconds)
        await call.send(body)

    return answer


async def just_in_time(call: Call) -> None:
    """Each answer comes within its deadline, as late as it may."""
    body = await call.honest()
    await asyncio.sleep(0.95 * call.timeout_s)
    await call.send(body)


def payload(data: bytes) -> Mode:
    async def answer(call: Call) -> None:
        await call.send_payload(data)

    return answer


def body(data: bytes) -> Mode:
    """The whole envelope is `data`."""

    async def answer(call: Call) -> None:
        await call.send(data)

    return answer


def status(code: int, text: str) -> Mode:
    return body(b"".join(encode_error(code, text)))


async def one_byte(call: Call) -> None:
    await asyncio.sleep(0.5)
    await call.send_payload(pb.ReadStreamResponse(data=b"x").SerializeToString())


async def all_asked_for(call: Call) -> None:
    await asyncio.sleep(2)
    size = pb.ReadStreamRequest.FromString(call.payload).len
    await call.send_payload(pb.ReadStreamResponse(data=b"x" * size).SerializeToString())


async def more_than_asked_for(call: Call) -> None:
    size = pb.ReadStreamRequest.FromString(call.payload).len
    await call.send_payload(pb.ReadStreamResponse(data=b"x" * (size + 1)).SerializeToString())


async def dripping(call: Call) -> None:
    """The honest frame, byte by byte."""
    data = frame(await call.honest(), call.stream_id)
    async with call.agent.sending:
        for index in range(len(data)):
            await asyncio.get_running_loop().sock_sendall(call._sock, data[index : index + 1])
            await asyncio.sleep(0.05)


async def half(call: Call) -> None:
    """A header, half of what it announces, and nothing ever after."""
    await call.send_bytes(HEADER.pack(MIB, call.stream_id, RESPONSE, 0) + bytes(MIB // 2))
    await asyncio.sleep(3600)


async def oversize(call: Call) -> None:
    await call.send(bytes(MAX_MESSAGE_BYTES + 1))


async def flooding(call: Call) -> None:
    """Frames for streams that were not opened, before and after the honest reply."""
    for _ in range(20):
        await call.send(bytes(64 * KIB), stream_id=call.stream_id + 2_000_001)
    await honest(call)
    for _ in range(20):
        await call.send(bytes(64 * KIB), stream_id=call.stream_id + 1)


def unbounded(offset: int) -> Mode:
    async def answer(call: Call) -> None:
        await call.send(await call.honest(), stream_id=max(call.stream_id + offset, 0))

    return answer


def kind(number: int) -> Mode:
    async def answer(call: Call) -> None:
        await call.send(await call.honest(), kind=number)

    return answer


async def twice(call: Call) -> None:
    answer = await call.honest()
    await call.send(answer)
    await call.send(answer)


async def hanging_up(call: Call) -> None:
    call._sock.shutdown(socket.SHUT_RDWR)


READS = ("ReadStdout", "ReadStderr")
EXITS = ("WaitProcess",)

MODES: Mapping[str, Mode] = {
    "answers nothing": silent,
    "answers nothing but health checks": only(
        *("CreateContainer", "StartContainer", "ExecProcess", "SignalProcess", "WaitProcess", "RemoveContainer"),
        *("DestroySandbox", "StatsContainer", "UpdateContainer", "PauseContainer", *READS),
        mode=silent,
    ),
    "never reports an exit": only(*EXITS, mode=silent),
    "reports every exit at once": only(
        *EXITS, mode=payload(pb.WaitProcessResponse(status=-(2**31)).SerializeToString())
    ),
    "never ends an output": only(*READS, mode=one_byte),
    "never ends an output and never reports an exit": only(
        *READS, *EXITS, mode=lambda call: (one_byte if call.method in READS else silent)(call)
    ),
    "gives all that a read asks for": only(*READS, mode=all_asked_for),
    "gives more than a read asks for": only(*READS, mode=more_than_asked_for),
    "forgets every process": only(*READS, *EXITS, mode=status(Code.NOT_FOUND, "no such process")),
    "drips each frame": dripping,
    "stops within a frame": half,
    "oversize frames": oversize,
    "floods with frames of no call": flooding,
    "floods with oom events": only("GetOOMEvent", mode=payload(pb.OOMEvent(container_id="app").SerializeToString())),
    "another call's stream": unbounded(-2),
    "a stream to come": unbounded(2),
    "an even stream": unbounded(1),
    "data frames": kind(DATA),
    "requests": kind(REQUEST),
    "frames of no kind": kind(77),
    "every reply twice": twice,
    "no envelope": body(b"\xff" * 100),
    "envelopes of very many fields": body(b"\x70\x00" * (30 * KIB)),
    "statuses of very many details": body(b"\x0a\x80\xf0\x03" + b"\x1a\x00" * (31 * KIB)),
    "no message": payload(b"\xff" * 100),
    "another message": payload(b"\x0a\x03abc\x10\x05\x18\x07"),
    "very many rows": only("StatsContainer", mode=payload(b"\x12\x00" * (500 * KIB))),
    "long errors with control characters": status(Code.INTERNAL, "\x1b[31m\n" * 3000),
    "errors of no known code": status(4711, "odd"),
    "slow": late(15.0),
    "very slow": late(300.0),
    "slow on purpose": just_in_time,
    "hangs up": hanging_up,
}
