"""A remote hypervisor service in threads of its own, with a real table of VMs; does on request what a bad one does.

Blocking sockets and threads, so that tests of synchronous code and of asyncio share it. Its words for an unknown VM and
their status are those of the cloud adaptor.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType

from google.protobuf.message import Message

from protos import hypervisor_pb2 as pb
from pyshim.ttrpc import Code
from pyshim.ttrpc.connection import RequestReceived, ServerConnection

WAIT_S = 60.0
_REQUESTS: dict[str, type[Message]] = {
    "Version": pb.VersionRequest,
    "CreateVM": pb.CreateVMRequest,
    "StartVM": pb.StartVMRequest,
    "StopVM": pb.StopVMRequest,
}


class Call:
    """One request, to be answered by its receiver."""

    def __init__(
        self, service: "FakeRemoteService", sock: socket.socket, core: ServerConnection, event: object
    ) -> None:
        assert isinstance(event, RequestReceived)
        self.service = service
        self.method = event.method
        self.timeout_s = event.timeout_ns / 1e9
        """What the caller said it waits; 0: as long as it takes."""
        self.request = _REQUESTS[event.method]()
        self.request.ParseFromString(event.payload)
        self._sock, self._core, self._stream_id = sock, core, event.stream_id

    @property
    def id(self) -> str:
        return str(getattr(self.request, "id", ""))

    def reply(self, message: Message) -> None:
        self.send(self._core.response(self._stream_id, message.SerializeToString()))

    def fail(self, code: int, text: str) -> None:
        self.send(self._core.error(self._stream_id, code, text))

    def send(self, data: bytes) -> None:
        """Raw bytes, to a caller that may be gone."""
        with contextlib.suppress(OSError):
            self._sock.sendall(data)

    def twice(self, message: Message) -> None:
        frame = self._core.response(self._stream_id, message.SerializeToString())
        self.send(frame + frame)

    def hang_up(self) -> None:
        self._sock.shutdown(socket.SHUT_RDWR)

    def do(self) -> None:
        """What a well-behaved service does."""
        self.service.usual(self)


Behaviour = Callable[[Call], None]


class FakeRemoteService:
    """Listens at `path` while entered. `behave[method]` replaces the usual behaviour; `calls` has all that came."""

    def __init__(self, directory: str) -> None:
        self.path = f"{directory}/hypervisor.sock"
        self.agent_path = f"{directory}/agent.ttrpc"
        self.calls: list[Call] = []
        self.vms: dict[str, str] = {}
        """State of each VM that is there: `created` or `running`."""
        self.behave: dict[str, Behaviour] = {}
        self._listener: socket.socket | None = None
        self._connections: list[socket.socket] = []
        self._changed = threading.Condition()

    # For tests

    def methods(self) -> list[str]:
        return [call.method for call in self.calls]

    def called(self, method: str, times: int = 1) -> Call:
        """The last call of `method`, once there were so many."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.methods().count(method) >= times, WAIT_S), method
            return [call for call in self.calls if call.method == method][-1]

    def crash(self) -> None:
        """The service is gone with its memory, every connection with it."""
        self.close()
        self.vms.clear()

    def open(self) -> None:
        listener = socket.socket(socket.AF_UNIX)
        if os.path.lexists(self.path):
            os.unlink(self.path)
        listener.bind(self.path)
        listener.listen()
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def close(self) -> None:
        if self._listener is not None:
            # Closing alone does not wake the thread that accepts.
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
            os.unlink(self.path)
        for sock in self._connections:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._connections.clear()

    def __enter__(self) -> "FakeRemoteService":
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # The service

    def usual(self, call: Call) -> None:
        with self._changed:
            self._usual(call)
            self._changed.notify_all()

    def _usual(self, call: Call) -> None:
        match call.method:
            case "Version":
                call.reply(pb.VersionResponse(version="0.0.0"))
            case "CreateVM" if call.id in self.vms:
                call.fail(Code.UNKNOWN, f"adding sandbox: sandbox {call.id} already exists")
            case "CreateVM":
                self.vms[call.id] = "created"
                call.reply(pb.CreateVMResponse(agentSocketPath=self.agent_path))
            case "StartVM" if self.vms.get(call.id) == "created":
                self.vms[call.id] = "running"
                call.reply(pb.StartVMResponse())
            case "StopVM" if call.id in self.vms:
                del self.vms[call.id]
                call.reply(pb.StopVMResponse())
            case _:
                call.fail(Code.UNKNOWN, f"stopping VM: sandbox {call.id} does not exist")

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            self._connections.append(sock)
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        core = ServerConnection()
        with sock:
            while True:
                try:
                    data = sock.recv(1 << 16)
                except OSError:
                    return
                if not data:
                    return
                for event in core.receive_data(data):
                    self._on_call(Call(self, sock, core, event))

    def _on_call(self, call: Call) -> None:
        with self._changed:
            self.calls.append(call)
            self._changed.notify_all()
        self.behave.get(call.method, Call.do)(call)


def after(seconds: float) -> Behaviour:
    """As usual, but late."""

    def behave(call: Call) -> None:
        time.sleep(seconds)
        call.do()

    return behave


def when(event: threading.Event) -> Behaviour:
    """As usual, once `event` is set."""

    def behave(call: Call) -> None:
        event.wait(WAIT_S)
        call.do()

    return behave


def never(_call: Call) -> None:
    """No answer."""


def done_unsaid(call: Call) -> None:
    """Carried out, and the connection lost before the answer."""
    call.send = lambda data: None  # type: ignore[method-assign]
    call.do()
    call.hang_up()


def hang_up(call: Call) -> None:
    """Not carried out, and the connection lost."""
    call.hang_up()
