"""`python -m bench.remote_stub DIRECTORY`: a remote hypervisor and the agents of its VMs, none of which exists.

Every shim that speaks the remote hypervisor's protocol can be measured on it, all on the same terms: the cost of a
pod is the shim's work. It listens on `hypervisor.sock` in DIRECTORY and gives each VM an agent on a socket of its
own. The agents answer as kata-agent does: a container runs until it is signalled, an exec has ended at once, and a read
of an ended process's output fails with `eof`. A container whose id begins with `flood<N>-` prints N MiB first.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections import defaultdict
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path

from google.protobuf.message import Message

from protos import hypervisor_pb2
from protos.agent import agent_pb2, health_pb2
from pyshim.ttrpc import CallContext, Code, RemoteError, Server

SOCKET = "hypervisor.sock"
_KILLED = 128 + 9


class Agent:
    """The agent of one VM."""

    def __init__(self) -> None:
        self._ended: defaultdict[tuple[str, str], asyncio.Event] = defaultdict(asyncio.Event)
        self._left: dict[str, int] = {}
        """The bytes that a container has yet to print."""
        own = {
            "WaitProcess": self._wait,
            "SignalProcess": self._signal,
            "ReadStdout": self._read_stdout,
            "ReadStderr": self._read,
            "GetOOMEvent": self._never,
            "GetGuestDetails": _answer(
                agent_pb2.GuestDetailsResponse(agent_details=agent_pb2.AgentDetails(version="4.1.0"))
            ),
            "StatsContainer": _answer(agent_pb2.StatsContainerResponse()),
        }
        methods = agent_pb2.DESCRIPTOR.services_by_name["AgentService"].methods_by_name
        self._server = Server(
            services={
                "grpc.AgentService": {name: own.get(name, _empty) for name in methods},
                "grpc.Health": {
                    "Check": _answer(health_pb2.HealthCheckResponse(status="SERVING")),
                    "Version": _answer(health_pb2.VersionCheckResponse(grpc_version="0.0.1", agent_version="4.1.0")),
                },
            },
            answers_at_deadline=False,
        )

    async def serve(self, listener: socket.socket) -> None:
        """Calls on `listener` are answered until `close`."""
        await self._server.serve(listener)

    async def close(self) -> None:
        """Every connection is closed, as when a VM ends."""
        await self._server.shutdown(0)

    async def _wait(self, payload: bytes, _call: CallContext) -> bytes:
        request = agent_pb2.WaitProcessRequest.FromString(payload)
        await self._end_of(request.container_id, request.exec_id).wait()
        status = _KILLED if _is_init(request.container_id, request.exec_id) else 0
        return agent_pb2.WaitProcessResponse(status=status).SerializeToString()

    async def _signal(self, payload: bytes, _call: CallContext) -> bytes:
        request = agent_pb2.SignalProcessRequest.FromString(payload)
        self._end_of(request.container_id, request.exec_id).set()
        return b""

    async def _read_stdout(self, payload: bytes, call: CallContext) -> bytes:
        request = agent_pb2.ReadStreamRequest.FromString(payload)
        container = request.container_id
        if container.startswith("flood") and _is_init(container, request.exec_id):
            left = self._left.setdefault(container, int(container[5:].split("-")[0]) << 20)
            if size := min(request.len, left):
                self._left[container] -= size
                return _zeros(size)
        return await self._read(payload, call)

    async def _read(self, payload: bytes, _call: CallContext) -> bytes:
        request = agent_pb2.ReadStreamRequest.FromString(payload)
        await self._end_of(request.container_id, request.exec_id).wait()
        raise RemoteError(Code.INTERNAL, "read meet eof")

    async def _never(self, _payload: bytes, _call: CallContext) -> bytes:
        await asyncio.Event().wait()
        return b""

    def _end_of(self, container: str, exec_id: str) -> asyncio.Event:
        if _is_init(container, exec_id):
            return self._ended[container, ""]
        ended = self._ended[container, exec_id]
        ended.set()
        return ended


class Hypervisor:
    """The service that shims ask for VMs."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._agents: dict[str, tuple[Agent, asyncio.Task[None]]] = {}
        self._server = Server(
            services={
                "hypervisor.Hypervisor": {
                    "Version": _answer(hypervisor_pb2.VersionResponse(version="0.0.0")),
                    "CreateVM": self._create,
                    "StartVM": _empty,
                    "StopVM": self._stop,
                }
            },
            answers_at_deadline=False,
        )

    async def serve(self) -> None:
        """Shims are served until this is cancelled."""
        await self._server.serve(_listener(self._directory / SOCKET))

    async def _create(self, payload: bytes, _call: CallContext) -> bytes:
        request = hypervisor_pb2.CreateVMRequest.FromString(payload)
        path = self._directory / f"{request.id}.sock"
        agent = Agent()
        serving = asyncio.create_task(agent.serve(_listener(path)), name=f"agent of {request.id}")
        self._agents[request.id] = (agent, serving)
        return hypervisor_pb2.CreateVMResponse(agentSocketPath=str(path)).SerializeToString()

    async def _stop(self, payload: bytes, _call: CallContext) -> bytes:
        request = hypervisor_pb2.StopVMRequest.FromString(payload)
        agent, serving = self._agents.pop(request.id, (None, None))
        if agent is not None and serving is not None:
            await agent.close()
            await serving
            (self._directory / f"{request.id}.sock").unlink(missing_ok=True)
        return b""


def _is_init(container: str, exec_id: str) -> bool:
    return exec_id in ("", container)


@cache
def _zeros(size: int) -> bytes:
    """The answer to a read, made once for each size: what is measured is the shim."""
    return agent_pb2.ReadStreamResponse(data=bytes(size)).SerializeToString()


def _answer(message: Message) -> Callable[[bytes, CallContext], Awaitable[bytes]]:
    reply = message.SerializeToString()

    async def handle(_payload: bytes, _call: CallContext) -> bytes:
        return reply

    return handle


async def _empty(_payload: bytes, _call: CallContext) -> bytes:
    return b""


def _listener(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    listener.setblocking(False)
    return listener


if __name__ == "__main__":
    asyncio.run(Hypervisor(Path(sys.argv[1])).serve())
