"""The guest agent's calls, each with its deadline, as the sandbox room's `Agent` seam asks for them.

What comes back is checked here or in `translate.py`: a lying guest ends in an error, never in a wrong belief.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from protos.agent import agent_pb2 as pb
from protos.agent import health_pb2
from pyshim.agent import translate
from pyshim.model.copies import CopiedPiece
from pyshim.model.errors import (
    AgentGone,
    AlreadyExists,
    DeadlineExceeded,
    ErrorCode,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    ShimError,
    Unavailable,
    Unimplemented,
)
from pyshim.model.guest import (
    AgentDetails,
    GuestContainer,
    GuestSandbox,
    NetworkInterface,
    NetworkNeighbour,
    NetworkRoute,
)
from pyshim.model.stats import ContainerStats
from pyshim.model.volumes import VolumeStats
from pyshim.ttrpc.client import Client
from pyshim.ttrpc.status import ConnectionClosed, TtrpcError
from pyshim.ttrpc.status import DeadlineExceeded as CallTimedOut

log = logging.getLogger("pyshim.agent")
M = TypeVar("M", bound=Message)

AGENT_SERVICE = "grpc.AgentService"
HEALTH_SERVICE = "grpc.Health"
MAX_ERROR_CHARS = 4096
REPLY_MARGIN_S = 0.5
"""For the way of a call whose time limit the agent itself keeps."""

_ERRORS: dict[int, type[ShimError]] = {
    ErrorCode.INVALID_ARGUMENT: InvalidArgument,
    ErrorCode.NOT_FOUND: NotFound,
    ErrorCode.ALREADY_EXISTS: AlreadyExists,
    ErrorCode.FAILED_PRECONDITION: FailedPrecondition,
    ErrorCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    ErrorCode.RESOURCE_EXHAUSTED: ResourceExhausted,
    ErrorCode.UNIMPLEMENTED: Unimplemented,
    ErrorCode.UNAVAILABLE: Unavailable,
}


class AgentClient:
    """One connection to one agent. Every call raises ShimError with the agent's code, or AgentGone."""

    def __init__(self, client: Client, *, request_timeout_s: float, set_up_timeout_s: float | None = None) -> None:
        """`set_up_timeout_s` is for the calls that set up the sandbox; as the others' without it."""
        self._client = client
        self._timeout_s = request_timeout_s
        self._set_up_timeout_s = request_timeout_s if set_up_timeout_s is None else set_up_timeout_s

    # ---- connection

    async def check(self, timeout_s: float) -> None:
        """The agent says it serves. Raises Unavailable when it says otherwise."""
        reply = await self._ask(
            "check agent",
            "Check",
            health_pb2.CheckRequest(),
            health_pb2.HealthCheckResponse,
            timeout_s=timeout_s,
            service=HEALTH_SERVICE,
        )
        if reply.status != health_pb2.HealthCheckResponse.SERVING:
            raise Unavailable(f"check agent: it answers status {reply.status}, not serving")

    async def gone(self) -> str:
        """Why the connection ended, once it has."""
        await self._client.closed()
        return str(self._client.close_error or "the agent closed it")

    async def close(self) -> None:
        self._client.close()
        await self._client.closed()

    # ---- sandbox

    async def set_policy(self, policy: str) -> None:
        request = pb.SetPolicyRequest(policy=policy)
        await self._tell("set policy in guest", "SetPolicy", request, timeout_s=self._set_up_timeout_s)

    async def create_sandbox(self, sandbox: GuestSandbox) -> None:
        await self._tell(
            f"create sandbox '{sandbox.sandbox_id}' in guest",
            "CreateSandbox",
            translate.create_sandbox(sandbox),
            timeout_s=self._set_up_timeout_s,
        )

    async def destroy_sandbox(self) -> None:
        await self._tell("destroy sandbox in guest", "DestroySandbox", pb.DestroySandboxRequest())

    async def guest_details(self) -> AgentDetails:
        request = pb.GuestDetailsRequest(mem_block_size=True, mem_hotplug_probe=True)
        reply = await self._ask("get guest details", "GetGuestDetails", request, pb.GuestDetailsResponse)
        return translate.agent_details(reply)

    async def online_cpu_memory(self, cpus: int, *, cpu_only: bool) -> None:
        request = pb.OnlineCPUMemRequest(wait=False, nb_cpus=cpus, cpu_only=cpu_only)
        await self._tell("bring cpus and memory online in guest", "OnlineCPUMem", request)

    async def volume_stats(self, guest_path: str) -> VolumeStats:
        request = pb.VolumeStatsRequest(volume_guest_path=guest_path)
        reply = await self._ask(
            f"get statistics of volume '{guest_path}'", "GetVolumeStats", request, pb.VolumeStatsResponse
        )
        return translate.volume_stats(reply)

    async def resize_volume(self, guest_path: str, size_bytes: int) -> None:
        request = pb.ResizeVolumeRequest(volume_guest_path=guest_path, size=size_bytes)
        await self._tell(f"resize volume '{guest_path}'", "ResizeVolume", request)

    async def next_oom_event(self) -> str:
        reply = await self._ask(
            "wait for oom event", "GetOOMEvent", pb.GetOOMEventRequest(), pb.OOMEvent, timeout_s=None
        )
        return reply.container_id

    # ---- network

    async def update_interface(self, interface: NetworkInterface) -> None:
        request = pb.UpdateInterfaceRequest(interface=translate.interface(interface))
        await self._tell(f"set up interface '{interface.name}' in guest", "UpdateInterface", request)

    async def update_routes(self, routes: tuple[NetworkRoute, ...]) -> None:
        request = pb.UpdateRoutesRequest(routes=pb.Routes(Routes=[translate.route(route) for route in routes]))
        await self._tell("set routes in guest", "UpdateRoutes", request)

    async def add_neighbours(self, neighbours: tuple[NetworkNeighbour, ...]) -> None:
        rows = pb.ARPNeighbors(ARPNeighbors=[translate.neighbour(neighbour) for neighbour in neighbours])
        await self._tell("add neighbours in guest", "AddARPNeighbors", pb.AddARPNeighborsRequest(neighbors=rows))

    # ---- containers

    async def create_container(self, container: GuestContainer, timeout_s: float) -> None:
        await self._tell(
            f"create container '{container.container_id}' in guest",
            "CreateContainer",
            translate.create_container(container),
            timeout_s=timeout_s,
        )

    async def copy_file(self, piece: CopiedPiece) -> None:
        await self._tell(f"copy '{piece.path}' into guest", "CopyFile", translate.copy_file(piece))

    async def start_container(self, container_id: str) -> None:
        request = pb.StartContainerRequest(container_id=container_id)
        await self._tell(f"start container '{container_id}' in guest", "StartContainer", request)

    async def remove_container(self, container_id: str, timeout_s: int) -> None:
        request = pb.RemoveContainerRequest(container_id=container_id, timeout=timeout_s)
        await self._tell(
            f"remove container '{container_id}' from guest",
            "RemoveContainer",
            request,
            timeout_s=timeout_s + REPLY_MARGIN_S,
        )

    async def update_container(self, container_id: str, resources: Mapping[str, Any]) -> None:
        request = pb.UpdateContainerRequest(
            container_id=container_id, resources=translate.linux_resources(resources, container_id)
        )
        await self._tell(f"update container '{container_id}' in guest", "UpdateContainer", request)

    async def stats_container(self, container_id: str) -> ContainerStats:
        request = pb.StatsContainerRequest(container_id=container_id)
        reply = await self._ask(
            f"measure container '{container_id}' in guest", "StatsContainer", request, pb.StatsContainerResponse
        )
        return translate.container_stats(reply)

    async def pause_container(self, container_id: str) -> None:
        request = pb.PauseContainerRequest(container_id=container_id)
        await self._tell(f"pause container '{container_id}' in guest", "PauseContainer", request)

    async def resume_container(self, container_id: str) -> None:
        request = pb.ResumeContainerRequest(container_id=container_id)
        await self._tell(f"resume container '{container_id}' in guest", "ResumeContainer", request)

    # ---- processes

    async def exec_process(self, container_id: str, exec_id: str, process: Mapping[str, Any]) -> None:
        request = pb.ExecProcessRequest(
            container_id=container_id, exec_id=exec_id, process=translate.process(process, exec_id)
        )
        await self._tell(f"run exec '{exec_id}' in container '{container_id}'", "ExecProcess", request)

    async def signal_process(self, container_id: str, exec_id: str, signal: int) -> None:
        request = pb.SignalProcessRequest(container_id=container_id, exec_id=exec_id, signal=signal)
        await self._tell(f"signal process '{container_id}/{exec_id}' in guest", "SignalProcess", request)

    async def wait_process(self, container_id: str, exec_id: str) -> int:
        request = pb.WaitProcessRequest(container_id=container_id, exec_id=exec_id)
        reply = await self._ask(
            f"wait for process '{container_id}/{exec_id}'",
            "WaitProcess",
            request,
            pb.WaitProcessResponse,
            timeout_s=None,
        )
        return reply.status & 0xFF if reply.status >= 0 else 255

    async def resize_terminal(self, container_id: str, exec_id: str, rows: int, columns: int) -> None:
        request = pb.TtyWinResizeRequest(container_id=container_id, exec_id=exec_id, row=rows, column=columns)
        await self._tell(f"resize terminal of '{container_id}/{exec_id}'", "TtyWinResize", request)

    # ---- streams: no deadline, a quiet process may say nothing for days

    async def write_stdin(self, container_id: str, exec_id: str, data: bytes | memoryview) -> int:
        request = pb.WriteStreamRequest(container_id=container_id, exec_id=exec_id, data=bytes(data))
        reply = await self._ask(
            f"write stdin of '{container_id}/{exec_id}'", "WriteStdin", request, pb.WriteStreamResponse, timeout_s=None
        )
        return reply.len

    async def read_stdout(self, container_id: str, exec_id: str, max_bytes: int) -> bytes | memoryview:
        return await self._read("ReadStdout", container_id, exec_id, max_bytes)

    async def read_stderr(self, container_id: str, exec_id: str, max_bytes: int) -> bytes | memoryview:
        return await self._read("ReadStderr", container_id, exec_id, max_bytes)

    async def _read(self, method: str, container_id: str, exec_id: str, max_bytes: int) -> bytes | memoryview:
        request = pb.ReadStreamRequest(container_id=container_id, exec_id=exec_id, len=max_bytes)
        action = f"{method} of '{container_id}/{exec_id}'"
        payload = await self._exchange(action, AGENT_SERVICE, method, request, None)
        try:
            data = translate.stream_data(payload)
        except DecodeError as exc:
            raise Internal(f"{action}: the agent's reply is not a grpc.ReadStreamResponse") from exc
        if len(data) > max_bytes:
            raise Internal(f"{action}: the agent sent more than was asked for")
        return data

    async def close_stdin(self, container_id: str, exec_id: str) -> None:
        request = pb.CloseStdinRequest(container_id=container_id, exec_id=exec_id)
        await self._tell(f"close stdin of '{container_id}/{exec_id}'", "CloseStdin", request)

    # ---- the one way out

    async def _tell(self, action: str, method: str, request: Message, *, timeout_s: float | None = -1) -> None:
        await self._exchange(action, AGENT_SERVICE, method, request, timeout_s)

    async def _ask(
        self,
        action: str,
        method: str,
        request: Message,
        reply_type: type[M],
        *,
        timeout_s: float | None = -1,
        service: str = AGENT_SERVICE,
    ) -> M:
        payload = await self._exchange(action, service, method, request, timeout_s)
        try:
            return reply_type.FromString(payload)
        except DecodeError as exc:
            raise Internal(f"{action}: the agent's reply is not a {reply_type.DESCRIPTOR.full_name}") from exc

    async def _exchange(
        self, action: str, service: str, method: str, request: Message, timeout_s: float | None
    ) -> bytes:
        """One call; -1 stands for the configured timeout, None for no deadline."""
        limit_s = self._timeout_s if timeout_s == -1 else timeout_s
        started = asyncio.get_running_loop().time()
        try:
            payload = await self._client.call(service, method, request.SerializeToString(), timeout_s=limit_s)
        except ConnectionClosed as exc:
            raise AgentGone(f"{action}: the agent is gone: {exc}") from exc
        except CallTimedOut as exc:
            raise DeadlineExceeded(f"{action}: no reply within {limit_s:g} s") from exc
        except TtrpcError as exc:
            raise _ERRORS.get(int(exc.code), Internal)(f"{action}: {printable(exc.message)}") from exc
        if log.isEnabledFor(logging.DEBUG):
            took_ms = round((asyncio.get_running_loop().time() - started) * 1000, 1)
            log.debug("-->", extra={"method": method, "bytes": len(payload), "took_ms": took_ms})
        return payload


def printable(text: str) -> str:
    """A guest's words made safe for a log or a terminal: bounded, and without control characters."""
    return "".join(char if char.isprintable() else " " for char in text[:MAX_ERROR_CHARS]).strip()
