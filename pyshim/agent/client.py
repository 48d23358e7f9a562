"""The guest agent's calls, each with its deadline: the seam `Agent` of `pyshim/model/seams.py`.

Replies are checked here and in `translate.py`. A reply that does not fit its call raises an error.
"""

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import Any, Protocol, TypeVar

from google.protobuf.message import DecodeError, Message

from protos.agent import agent_pb2 as pb
from protos.agent import health_pb2, oci_pb2
from pyshim.agent import translate
from pyshim.agent.samples import StatsSamples
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
    ContainerStats,
    GuestContainer,
    GuestSandbox,
    NetworkInterface,
    NetworkNeighbour,
    NetworkRoute,
    Storage,
)
from pyshim.model.observation import AgentCalls, context, span
from pyshim.model.volumes import CopiedPiece, VolumeStats
from pyshim.ttrpc.status import CallTimedOut, ConnectionClosed, TtrpcError

log = logging.getLogger(__name__)
M = TypeVar("M", bound=Message)

AGENT_SERVICE = "grpc.AgentService"
HEALTH_SERVICE = "grpc.Health"
MAX_ERROR_CHARS = 4096
"""Characters of an agent's error text that are used: an error and a log line stay readable."""
CONFIGURED_S = -1.0
"""Stands for the timeout of the configuration."""
REPLY_MARGIN_S = 0.5
"""Seconds for request and reply of a call whose time limit the agent keeps."""
MAX_REPLY_BYTES = 64 * 1024
"""Bytes of the largest reply of an ordinary call, added to twice the request's size: UpdateRoutes returns the
request."""
MAX_STATS_BYTES = 256 * 1024
"""Bytes of the largest reply of StatsContainer: a guest with hundreds of CPUs and disks needs some tens of KiB. The
reply is decoded on the event loop; one of this size takes up to 20 ms."""
MAX_ALL_STATS_BYTES = 2 * MAX_STATS_BYTES
"""Bytes of the largest reply of StatsContainers: a container has some 3 KiB."""
METRICS_TIMEOUT_S = 2.0
"""Seconds for GetMetrics: the node's endpoint gives a shim 5, Prometheus gives the node's endpoint 10."""
MAX_METRICS_BYTES = 1024 * 1024
"""Bytes of the largest reply of GetMetrics: kata-agent's has some 140 KiB in a guest of two CPUs."""
MAX_TERMINATION_MESSAGE_BYTES = 16 * 1024
"""Bytes of the largest reply of GetDiagnosticData: Kubernetes has messages of 4 KiB, and an agent replaces each byte
that is no UTF-8 by three."""
TERMINATION_MESSAGE_TIMEOUT_S = 2.0
"""Seconds for GetDiagnosticData, for which the report of a container's exit waits."""
MAX_IPTABLES_BYTES = 2 * 1024 * 1024
"""Bytes of the largest reply of GetIPTables; the text for SetIPTables has to fit into one ttrpc message, of 4 MiB."""
ENVELOPE_BYTES = 1024
"""Bytes that envelope and message may add to the data that a read asked for."""
LATE_STATUS_S = 3600.0
"""Seconds to wait for a late answer to WaitProcess: an agent, or a proxy before it, that ignores the timeout reports
the exit later, and only once."""
END_OF_STREAM = frozenset({"eof", "read meet eof", "Input/output error (os error 5)"})
"""Texts of the INTERNAL error by which kata-agent reports the end of an output (its src/agent/src/rpc.rs, read_stream).

The last one is what the kernel answers to a read of a terminal after the last process with it has ended; reading a pipe
never fails so.
"""
KEEPS_OUTPUT = "output-after-wait"
"""An extra feature of our own agent: output stays readable after WaitProcess, and a read of no bytes ends it."""
JOINS_BY_NAME = "join-pid-namespace-by-name"
"""Another: a container joins the pid namespace of the container that its spec names."""
SETS_UNIFIED = "unified-resources"
"""Another: it takes `linux.resources.unified`, for which kata-agent's protocol has no field."""
MEASURES_ALL = "stats-of-all-containers"
"""Another: StatsContainers answers for all containers at once."""
_OF_THE_KUBELET = frozenset({"memory.oom.group", "memory.min", "memory.low", "memory.high", "memory.swap.max"})
"""Files of `linux.resources.unified` that a kubelet sets for each container of a node with cgroup v2: an agent that
cannot set them is no reason to refuse the pod. Source: Kubernetes 1.37, pkg/kubelet/kuberuntime."""
_BACKTRACE = "Stack backtrace:"
"""The beginning of kata-agent's addition to its errors (anyhow, RUST_BACKTRACE=full)."""

LONG_S = 3.0
"""Seconds after which an error says how long the agent took: it has waited, for instance for a device to appear."""
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


class Wire(Protocol):
    """The connection to the agent: a `ttrpc.Client`, or one that a test put around it."""

    @property
    def close_error(self) -> Exception | None: ...

    async def call(
        self,
        service: str,
        method: str,
        payload: bytes,
        *,
        timeout_s: float | None,
        late_s: float = 0.0,
        metadata: Iterable[tuple[str, str]] = (),
        max_reply_bytes: int | None = None,
    ) -> bytes: ...
    async def closed(self) -> None: ...
    def close(self) -> None: ...


class AgentClient:
    """One connection to one agent. Every call raises ShimError with the agent's code, or AgentGone."""

    def __init__(
        self,
        wire: Wire,
        *,
        request_timeout_s: float,
        set_up_timeout_s: float | None = None,
        durations: AgentCalls | None = None,
    ) -> None:
        """`set_up_timeout_s` bounds the calls that set up the sandbox; without it, `request_timeout_s` does.

        `durations` counts the calls under Kata's names, those of their requests: `grpc.CheckRequest`.
        """
        self._wire = wire
        self._durations = durations or AgentCalls(time.monotonic)
        self._timeout_s = request_timeout_s
        self._set_up_timeout_s = request_timeout_s if set_up_timeout_s is None else set_up_timeout_s
        self._features: frozenset[str] | None = None
        self._samples = StatsSamples(self._measure)
        self._all_stats_payload = b""
        self._all_stats: Mapping[str, ContainerStats] = {}
        """What the last answer to StatsContainers, that payload, tells."""

    # ---- connection

    async def check(self, timeout_s: float) -> None:
        """The agent answers. Raises Unavailable when it says that it does not serve.

        Any other status counts as serving: cloud adaptors answer UNKNOWN in place of an agent.
        """
        reply = await self._ask(
            "check agent",
            "Check",
            health_pb2.CheckRequest(),
            health_pb2.HealthCheckResponse,
            timeout_s=timeout_s,
            service=HEALTH_SERVICE,
        )
        if reply.status == health_pb2.HealthCheckResponse.NOT_SERVING:
            raise Unavailable("check agent: it answers that it does not serve")

    async def gone(self) -> str:
        """The reason why the connection ended, once it has."""
        await self._wire.closed()
        return str(self._wire.close_error or "the agent closed it")

    async def close(self) -> None:
        await self._samples.close()
        self._wire.close()
        await self._wire.closed()

    # ---- sandbox

    async def set_policy(self, policy: str) -> None:
        request = pb.SetPolicyRequest(policy=policy)
        await self._call("set policy in guest", "SetPolicy", request, timeout_s=self._set_up_timeout_s)

    async def create_sandbox(self, sandbox: GuestSandbox) -> None:
        await self._call(
            f"create sandbox '{sandbox.sandbox_id}' in guest",
            "CreateSandbox",
            translate.create_sandbox(sandbox),
            timeout_s=self._set_up_timeout_s,
        )

    async def destroy_sandbox(self) -> None:
        await self._call("destroy sandbox in guest", "DestroySandbox", pb.DestroySandboxRequest())

    async def guest_details(self) -> AgentDetails:
        request = pb.GuestDetailsRequest(mem_block_size=True, mem_hotplug_probe=True)
        reply = await self._ask("get guest details", "GetGuestDetails", request, pb.GuestDetailsResponse)
        return translate.agent_details(reply)

    async def online_cpu_memory(self, cpus: int, *, cpu_only: bool) -> None:
        request = pb.OnlineCPUMemRequest(wait=False, nb_cpus=cpus, cpu_only=cpu_only)
        await self._call("bring cpus and memory online in guest", "OnlineCPUMem", request)

    async def reseed_random(self, seed: bytes) -> None:
        await self._call("reseed random numbers of guest", "ReseedRandomDev", pb.ReseedRandomDevRequest(data=seed))

    async def set_time(self, time_ns: int) -> None:
        request = pb.SetGuestDateTimeRequest(Sec=time_ns // 10**9, Usec=time_ns % 10**9 // 1000)
        await self._call("set clock of guest", "SetGuestDateTime", request)

    async def add_swap(self, pci_path: str) -> None:
        slots = [int(slot, 16) for slot in pci_path.split("/")]
        await self._call(f"add swap '{pci_path}' in guest", "AddSwap", pb.AddSwapRequest(PCIPath=slots))

    async def update_ephemeral_mounts(self, storages: tuple[Storage, ...]) -> None:
        request = pb.UpdateEphemeralMountsRequest(storages=[translate.storage(each) for each in storages])
        points = ", ".join(f"'{each.mount_point}'" for each in storages)
        await self._call(f"resize {points} in guest", "UpdateEphemeralMounts", request)

    async def volume_stats(self, guest_path: str) -> VolumeStats:
        request = pb.VolumeStatsRequest(volume_guest_path=guest_path)
        reply = await self._ask(
            f"get statistics of volume '{guest_path}'", "GetVolumeStats", request, pb.VolumeStatsResponse
        )
        return translate.volume_stats(reply)

    async def resize_volume(self, guest_path: str, size_bytes: int) -> None:
        request = pb.ResizeVolumeRequest(volume_guest_path=guest_path, size=size_bytes)
        await self._call(f"resize volume '{guest_path}'", "ResizeVolume", request)

    async def metrics(self) -> str:
        reply = await self._ask(
            "get metrics of guest",
            "GetMetrics",
            pb.GetMetricsRequest(),
            pb.Metrics,
            timeout_s=METRICS_TIMEOUT_S,
            max_bytes=MAX_METRICS_BYTES,
        )
        return reply.metrics

    async def iptables(self, *, ipv6: bool) -> bytes:
        request = pb.GetIPTablesRequest(is_ipv6=ipv6)
        reply = await self._ask(
            "get iptables of guest", "GetIPTables", request, pb.GetIPTablesResponse, max_bytes=MAX_IPTABLES_BYTES
        )
        return reply.data

    async def set_iptables(self, data: bytes, *, ipv6: bool) -> None:
        await self._call("set iptables in guest", "SetIPTables", pb.SetIPTablesRequest(is_ipv6=ipv6, data=data))

    async def next_oom_event(self) -> str:
        reply = await self._ask(
            "wait for oom event", "GetOOMEvent", pb.GetOOMEventRequest(), pb.OOMEvent, timeout_s=None
        )
        return reply.container_id

    # ---- network

    async def update_interface(self, interface: NetworkInterface) -> None:
        request = pb.UpdateInterfaceRequest(interface=translate.interface(interface))
        await self._call(f"set up interface '{interface.name}' in guest", "UpdateInterface", request)

    async def update_routes(self, routes: tuple[NetworkRoute, ...]) -> None:
        request = pb.UpdateRoutesRequest(routes=pb.Routes(Routes=[translate.route(route) for route in routes]))
        await self._call("set routes in guest", "UpdateRoutes", request)

    async def add_neighbours(self, neighbours: tuple[NetworkNeighbour, ...]) -> None:
        rows = pb.ARPNeighbors(ARPNeighbors=[translate.neighbour(neighbour) for neighbour in neighbours])
        await self._call("add neighbours in guest", "AddARPNeighbors", pb.AddARPNeighborsRequest(neighbors=rows))

    # ---- containers

    async def create_container(self, container: GuestContainer, timeout_s: float) -> None:
        doing = f"create container '{container.container_id}' in guest"
        request = translate.create_container(container)
        await self._check_unified(doing, request.OCI.Linux.Resources)
        await self._call(doing, "CreateContainer", request, timeout_s=timeout_s)

    async def copy_file(self, piece: CopiedPiece) -> None:
        await self._call(f"copy '{piece.path}' into guest", "CopyFile", translate.copy_file(piece))

    async def start_container(self, container_id: str) -> None:
        request = pb.StartContainerRequest(container_id=container_id)
        await self._call(f"start container '{container_id}' in guest", "StartContainer", request)

    async def remove_container(self, container_id: str, timeout_s: int) -> None:
        request = pb.RemoveContainerRequest(container_id=container_id, timeout=timeout_s)
        await self._call(
            f"remove container '{container_id}' from guest",
            "RemoveContainer",
            request,
            timeout_s=timeout_s + REPLY_MARGIN_S,
        )
        self._samples.forget(container_id)

    async def free_share(self) -> None:
        """The guest has let go of what the host has taken out of the share."""
        request = pb.RemoveStaleVirtiofsShareMountsRequest()
        await self._call("free share in guest", "RemoveStaleVirtiofsShareMounts", request)

    async def termination_message(self, container_id: str) -> str:
        reply = await self._ask(
            f"read termination message of container '{container_id}' in guest",
            "GetDiagnosticData",
            pb.GetDiagnosticDataRequest(log_type="termination_log", container_id=container_id),
            pb.GetDiagnosticDataResponse,
            timeout_s=TERMINATION_MESSAGE_TIMEOUT_S,
            max_bytes=MAX_TERMINATION_MESSAGE_BYTES,
        )
        return reply.data

    async def update_container(self, container_id: str, resources: Mapping[str, Any]) -> None:
        doing = f"update container '{container_id}' in guest"
        limits = translate.linux_resources(resources, container_id)
        await self._check_unified(doing, limits)
        request = pb.UpdateContainerRequest(container_id=container_id, resources=limits)
        await self._call(doing, "UpdateContainer", request)
        self._samples.forget(container_id)

    async def stats_container(self, container_id: str) -> ContainerStats:
        """As `StatsSamples.of`."""
        return await self._samples.of(container_id)

    async def _measure(self, container_id: str) -> Mapping[str, ContainerStats]:
        """The statistics of the container, and of all others if the agent tells them in one answer."""
        if await self._has(MEASURES_ALL):
            doing = "measure containers in guest"
            payload = await self._call(
                doing, "StatsContainers", pb.StatsContainersRequest(), max_bytes=MAX_ALL_STATS_BYTES
            )
            if payload != self._all_stats_payload:  # a pod that rests has the same numbers each second
                found = _decoded(doing, payload, pb.StatsContainersResponse)
                self._all_stats, self._all_stats_payload = translate.containers_stats(found), payload
            if container_id in self._all_stats:
                return self._all_stats
        request = pb.StatsContainerRequest(container_id=container_id)
        reply = await self._ask(
            f"measure container '{container_id}' in guest",
            "StatsContainer",
            request,
            pb.StatsContainerResponse,
            max_bytes=MAX_STATS_BYTES,
        )
        return {container_id: translate.container_stats(reply)}

    async def pause_container(self, container_id: str) -> None:
        request = pb.PauseContainerRequest(container_id=container_id)
        await self._call(f"pause container '{container_id}' in guest", "PauseContainer", request)

    async def resume_container(self, container_id: str) -> None:
        request = pb.ResumeContainerRequest(container_id=container_id)
        await self._call(f"resume container '{container_id}' in guest", "ResumeContainer", request)

    # ---- processes

    async def exec_process(self, container_id: str, exec_id: str, process: Mapping[str, Any]) -> None:
        request = pb.ExecProcessRequest(
            container_id=container_id, exec_id=exec_id, process=translate.process(process, exec_id)
        )
        await self._call(f"run exec '{exec_id}' in container '{container_id}'", "ExecProcess", request)

    async def signal_process(self, container_id: str, exec_id: str, signal: int) -> None:
        request = pb.SignalProcessRequest(container_id=container_id, exec_id=exec_id, signal=signal)
        await self._call(f"signal process '{container_id}/{exec_id}' in guest", "SignalProcess", request)

    async def wait_process(self, container_id: str, exec_id: str, within_s: float | None = None) -> int:
        request = pb.WaitProcessRequest(container_id=container_id, exec_id=exec_id)
        reply = await self._ask(
            f"wait for process '{container_id}/{exec_id}'",
            "WaitProcess",
            request,
            pb.WaitProcessResponse,
            timeout_s=within_s,
            late_s=LATE_STATUS_S,
        )
        return reply.status & 0xFF if reply.status >= 0 else 255

    async def resize_terminal(self, container_id: str, exec_id: str, rows: int, columns: int) -> None:
        request = pb.TtyWinResizeRequest(container_id=container_id, exec_id=exec_id, row=rows, column=columns)
        await self._call(f"resize terminal of '{container_id}/{exec_id}'", "TtyWinResize", request)

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
        try:
            limit_bytes = max(max_bytes + ENVELOPE_BYTES, MAX_REPLY_BYTES)
            payload = await self._call(action, method, request, timeout_s=None, max_bytes=limit_bytes)
        except Internal as exc:
            if isinstance(exc.__cause__, TtrpcError) and guest_text(exc.__cause__.message) in END_OF_STREAM:
                return b""
            raise
        try:
            data = translate.stream_data(payload)
        except DecodeError as exc:
            raise Internal(f"{action}: the agent's reply is not a grpc.ReadStreamResponse") from exc
        if len(data) > max_bytes:
            raise Internal(f"{action}: the agent sent more than was asked for")
        return data

    async def keeps_output(self) -> bool:
        return await self._has(KEEPS_OUTPUT)

    async def joins_by_name(self) -> bool:
        return await self._has(JOINS_BY_NAME)

    async def _check_unified(self, doing: str, resources: oci_pb2.LinuxResources) -> None:
        """The agent can set the cgroup files of `resources.unified`.

        Else those of the kubelet are left out, and InvalidArgument names another.
        """
        if not resources.Unified or await self._has(SETS_UNIFIED):
            return
        others = sorted(set(resources.Unified) - _OF_THE_KUBELET)
        if others:
            raise InvalidArgument(f"{doing}: this guest's agent cannot set {others[0][:80]!r} of resources.unified")
        log.warning("cgroup files not set in guest", extra={"files": ",".join(sorted(resources.Unified))})
        resources.Unified.clear()

    async def _has(self, feature: str) -> bool:
        if self._features is None:
            self._features = frozenset((await self.guest_details()).extra_features)
        return feature in self._features

    async def end_output(self, container_id: str, exec_id: str) -> None:
        request = pb.ReadStreamRequest(container_id=container_id, exec_id=exec_id, len=0)
        for method in ("ReadStdout", "ReadStderr"):
            await self._call(f"end {method} of '{container_id}/{exec_id}'", method, request)

    async def close_stdin(self, container_id: str, exec_id: str) -> None:
        request = pb.CloseStdinRequest(container_id=container_id, exec_id=exec_id)
        await self._call(f"close stdin of '{container_id}/{exec_id}'", "CloseStdin", request)

    # ---- every call

    async def _ask(
        self,
        action: str,
        method: str,
        request: Message,
        reply_type: type[M],
        *,
        timeout_s: float | None = CONFIGURED_S,
        late_s: float = 0.0,
        max_bytes: int = MAX_REPLY_BYTES,
        service: str = AGENT_SERVICE,
    ) -> M:
        payload = await self._call(
            action, method, request, timeout_s=timeout_s, late_s=late_s, max_bytes=max_bytes, service=service
        )
        return _decoded(action, payload, reply_type)

    async def _call(
        self,
        action: str,
        method: str,
        request: Message,
        *,
        timeout_s: float | None = CONFIGURED_S,
        late_s: float = 0.0,
        max_bytes: int = MAX_REPLY_BYTES,
        service: str = AGENT_SERVICE,
    ) -> bytes:
        """The reply to one call; without `timeout_s` the call has no deadline.

        The agent gets the timeout; the client waits for the reply `late_s` longer. A reply larger than `max_bytes` plus
        twice the request is refused before it is decoded.

        A call of the agent's own service with a deadline is a span, whose `traceparent` (W3C, as kata-agent reads it)
        goes to the agent while the trace is followed. Streams and waits have none: they outlast the span that began
        them.
        """
        limit_s = self._timeout_s if timeout_s == CONFIGURED_S else timeout_s
        is_span = limit_s is not None and service == AGENT_SERVICE
        with span(f"agent {method}", saved=False) if is_span else nullcontext():
            traceparent = context() if is_span else ""
            started = asyncio.get_running_loop().time()
            try:
                sent = request.SerializeToString()
                payload = await self._wire.call(
                    service,
                    method,
                    sent,
                    timeout_s=limit_s,
                    late_s=late_s,
                    metadata=(("traceparent", traceparent),) if traceparent else (),
                    max_reply_bytes=max_bytes + 2 * len(sent),
                )
            except ConnectionClosed as exc:
                raise AgentGone(f"{action}: the agent is gone: {exc}") from exc
            except CallTimedOut as exc:
                raise DeadlineExceeded(f"{action}: no reply within {limit_s:g} s") from exc
            except TtrpcError as exc:
                self._durations.answered()
                waited_s = asyncio.get_running_loop().time() - started
                waited = f" (the agent answered after {waited_s:.0f} s)" if limit_s and waited_s >= LONG_S else ""
                raise _ERRORS.get(int(exc.code), Internal)(f"{action}: {guest_text(exc.message)}{waited}") from exc
            else:
                self._durations.answered()
            finally:
                took_s = asyncio.get_running_loop().time() - started
                self._durations.took(request.DESCRIPTOR.full_name, took_s)
        if log.isEnabledFor(logging.DEBUG):
            took_ms = round(took_s * 1000, 1)
            log.debug("-->", extra={"method": method, "bytes": len(payload), "took_ms": took_ms})
        return payload


def _decoded(action: str, payload: bytes, reply_type: type[M]) -> M:
    try:
        return reply_type.FromString(payload)
    except DecodeError as exc:
        raise Internal(f"{action}: the agent's reply is not a {reply_type.DESCRIPTOR.full_name}") from exc


def guest_text(text: str) -> str:
    """A guest's text, safe for a log or a terminal: bounded, without control characters, without a backtrace."""
    shown = text[:MAX_ERROR_CHARS].partition(_BACKTRACE)[0]
    return "".join(char if char.isprintable() else " " for char in shown).strip()
