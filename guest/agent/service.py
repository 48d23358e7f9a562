"""The table from method to function. Only here errors become statuses."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from protos.agent import agent_pb2, health_pb2
from pyshim.ttrpc import CallContext, ImmediateHandler, UnaryHandler

from guest.agent.calls.containers import ContainerCalls, ProcessCalls
from guest.agent.calls.network import NetworkCalls
from guest.agent.calls.sandbox import GuestCalls, SandboxCalls
from guest.agent.calls.stats import StatsCalls
from guest.agent.calls.volumes import VolumeCalls
from guest.agent.errors import AgentError, Internal, InvalidArgument, os_cause

log = logging.getLogger(__name__)

Function: TypeAlias = Callable[[Any], Awaitable[Message | None]]
"""A call: from its request to its reply, None for the empty message."""
Handler: TypeAlias = UnaryHandler | ImmediateHandler
ImmediateFunction: TypeAlias = Callable[[Any], Message]
"""A call that waits for nothing."""
# These calls change nothing before they are answered, so they end with their connection or deadline. All other calls
# are finished even if the caller is gone.
_WAITING = frozenset({"WaitProcess", "ReadStdout", "ReadStderr", "GetOOMEvent"})


def services(
    *,
    containers: ContainerCalls,
    guest: GuestCalls,
    network: NetworkCalls,
    processes: ProcessCalls,
    sandbox: SandboxCalls,
    stats: StatsCalls,
    volumes: VolumeCalls,
) -> dict[str, dict[str, Handler]]:
    """The handlers of the agent, by service and method."""
    health: dict[str, Function] = {"Check": guest.check, "Version": guest.version}
    agent: dict[str, Function] = {
        "AddARPNeighbors": network.add_neighbors,
        "AddSwap": guest.add_swap,
        "CloseStdin": processes.close_stdin,
        "CopyFile": volumes.copy_file,
        "CreateContainer": containers.create,
        "CreateSandbox": sandbox.create,
        "DestroySandbox": sandbox.destroy,
        "ExecProcess": processes.execute,
        "GetDiagnosticData": containers.diagnostic_data,
        "GetGuestDetails": guest.details,
        "GetIPTables": network.get_iptables,
        "GetMetrics": stats.metrics,
        "GetOOMEvent": stats.oom_event,
        "GetVolumeStats": volumes.stats,
        "ListInterfaces": network.list_interfaces,
        "ListRoutes": network.list_routes,
        "OnlineCPUMem": guest.online_cpu_mem,
        "PauseContainer": containers.pause,
        "ReadStderr": processes.read_stderr,
        "ReadStdout": processes.read_stdout,
        "RemoveContainer": containers.remove,
        "RemoveStaleVirtiofsShareMounts": volumes.remove_stale_shares,
        "ReseedRandomDev": guest.reseed_random,
        "ResizeVolume": volumes.resize,
        "ResumeContainer": containers.resume,
        "SetGuestDateTime": guest.set_time,
        "SetIPTables": network.set_iptables,
        "SetPolicy": guest.set_policy,
        "SignalProcess": processes.signal,
        "StartContainer": containers.start,
        "TtyWinResize": processes.resize_terminal,
        "UpdateContainer": containers.update,
        "UpdateEphemeralMounts": volumes.update_ephemeral_mounts,
        "UpdateInterface": network.update_interface,
        "UpdateRoutes": network.update_routes,
        "WaitProcess": processes.wait,
        "WriteStdin": processes.write_stdin,
    }
    immediate: dict[str, ImmediateFunction] = {
        "StatsContainer": stats.container,
        "StatsContainers": stats.all_containers,
    }
    return {
        "grpc.Health": _handlers(health_pb2.DESCRIPTOR.services_by_name["Health"], health, {}),
        "grpc.AgentService": _handlers(agent_pb2.DESCRIPTOR.services_by_name["AgentService"], agent, immediate),
    }


def _handlers(
    definition: Any, functions: Mapping[str, Function], immediate: Mapping[str, ImmediateFunction]
) -> dict[str, Handler]:
    """Handlers of a service; the types of its requests are those of its definition, a protobuf ServiceDescriptor."""

    def request_type(name: str) -> type[Message]:
        return GetMessageClass(definition.methods_by_name[name].input_type)

    handlers: dict[str, Handler] = {
        name: UnaryHandler(_handler(name, function, request_type(name)), cancel_on_timeout=name in _WAITING)
        for name, function in functions.items()
    }
    handlers |= {
        name: ImmediateHandler(_immediate(name, function, request_type(name))) for name, function in immediate.items()
    }
    return handlers


def _handler(
    name: str, function: Function, request_type: type[Message]
) -> Callable[[bytes, CallContext], Awaitable[bytes]]:
    """`function` on the wire. Raises AgentError and nothing else (but CancelledError)."""

    async def call(payload: bytes, context: CallContext) -> bytes:
        with _answering(name, context, payload):
            return _encoded(await function(_decoded(request_type, payload)))

    return call


def _immediate(
    name: str, function: ImmediateFunction, request_type: type[Message]
) -> Callable[[bytes, CallContext], bytes]:
    """As `_handler`."""

    def call(payload: bytes, context: CallContext) -> bytes:
        with _answering(name, context, payload):
            return _encoded(function(_decoded(request_type, payload)))

    return call


@contextmanager
def _answering(name: str, context: CallContext, payload: bytes) -> Iterator[None]:
    """The call is in the log, and what it raises becomes an AgentError."""
    log.debug("-->", extra={"stream": context.stream_id, "method": name, "bytes": len(payload)})
    try:
        yield
    except AgentError as error:
        log.info("call failed", extra={"method": name, "code": error.code, "error": error})
        raise
    except OSError as error:
        where = f"{error.filename!r}: " if error.filename else ""
        log.warning("call failed", extra={"method": name, "error": f"{where}{os_cause(error)}"})
        raise Internal(f"{name}: {where}{os_cause(error)}") from error
    except Exception as error:  # a bug in one call must not end the others
        log.exception("call crashed", extra={"method": name})
        raise Internal(f"{name}: {type(error).__name__}: {error}") from error
    log.debug("<--", extra={"stream": context.stream_id, "method": name})


def _encoded(reply: Message | None) -> bytes:
    return b"" if reply is None else reply.SerializeToString()


def _decoded(request_type: type[Message], payload: bytes) -> Message:
    try:
        return request_type.FromString(payload)
    except DecodeError as error:
        raise InvalidArgument(f"decode {request_type.DESCRIPTOR.name}: {error}") from None
