"""The table from method to function. Only here errors become statuses."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from protos.agent import agent_pb2, health_pb2
from pyshim.ttrpc import CallContext, UnaryHandler

from guest.agent.calls.containers import ContainerCalls, ProcessCalls
from guest.agent.calls.network import NetworkCalls
from guest.agent.calls.sandbox import GuestCalls, SandboxCalls
from guest.agent.calls.stats import StatsCalls
from guest.agent.calls.volumes import VolumeCalls
from guest.agent.errors import AgentError, Internal, InvalidArgument, os_cause

log = logging.getLogger(__name__)

Function: TypeAlias = Callable[[Any], Awaitable[Message | None]]
"""A call: from its request to its reply, None for the empty message."""
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
) -> dict[str, dict[str, UnaryHandler]]:
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
        "StatsContainer": stats.container,
        "StatsContainers": stats.all_containers,
        "TtyWinResize": processes.resize_terminal,
        "UpdateContainer": containers.update,
        "UpdateEphemeralMounts": volumes.update_ephemeral_mounts,
        "UpdateInterface": network.update_interface,
        "UpdateRoutes": network.update_routes,
        "WaitProcess": processes.wait,
        "WriteStdin": processes.write_stdin,
    }
    return {
        "grpc.Health": _handlers(health_pb2.DESCRIPTOR.services_by_name["Health"], health),
        "grpc.AgentService": _handlers(agent_pb2.DESCRIPTOR.services_by_name["AgentService"], agent),
    }


def _handlers(definition: Any, functions: Mapping[str, Function]) -> dict[str, UnaryHandler]:
    """Handlers of a service; the types of its requests are those of its definition, a protobuf ServiceDescriptor."""
    return {
        name: UnaryHandler(
            _handler(name, function, GetMessageClass(definition.methods_by_name[name].input_type)),
            cancel_on_timeout=name in _WAITING,
        )
        for name, function in functions.items()
    }


def _handler(
    name: str, function: Function, request_type: type[Message]
) -> Callable[[bytes, CallContext], Awaitable[bytes]]:
    """`function` on the wire. Raises AgentError and nothing else (but CancelledError)."""

    async def call(payload: bytes, context: CallContext) -> bytes:
        log.debug("-->", extra={"stream": context.stream_id, "method": name, "bytes": len(payload)})
        try:
            reply = await function(_decoded(request_type, payload))
            data = b"" if reply is None else reply.SerializeToString()
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
        log.debug("<--", extra={"stream": context.stream_id, "method": name, "bytes": len(data)})
        return data

    return call


def _decoded(request_type: type[Message], payload: bytes) -> Message:
    try:
        return request_type.FromString(payload)
    except DecodeError as error:
        raise InvalidArgument(f"decode {request_type.DESCRIPTOR.name}: {error}") from None
