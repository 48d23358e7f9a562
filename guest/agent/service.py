"""The table from wire method to function, and the one place where errors become statuses.

A call is `async def f(agent, request) -> Message | None` in `guest.agent.calls.<module>`; None is the empty message.
Modules are imported by the first call that needs them. Calls marked `~` only wait: they end when their connection or
deadline does, without effect.
"""

from __future__ import annotations

from guest.agent import log
from guest.agent.errors import AgentError, Unimplemented, os_cause
from guest.agent.wire.codec import decode, encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from guest.agent.agent import Agent

_HEALTH = "grpc.Health"
_AGENT = "grpc.AgentService"

# method: "module function Request", optionally with ~ before the module
_ROUTES: dict[str, dict[str, str]] = {
    _HEALTH: {
        "Check": "health check CheckRequest",
        "Version": "health version CheckRequest",
    },
    _AGENT: {
        "CreateContainer": "containers create CreateContainerRequest",
        "StartContainer": "containers start StartContainerRequest",
        "RemoveContainer": "containers remove RemoveContainerRequest",
        "ExecProcess": "processes execute ExecProcessRequest",
        "SignalProcess": "processes signal SignalProcessRequest",
        "WaitProcess": "~processes wait WaitProcessRequest",
        "UpdateContainer": "containers update UpdateContainerRequest",
        "UpdateEphemeralMounts": "volumes update_ephemeral_mounts UpdateEphemeralMountsRequest",
        "StatsContainer": "stats container StatsContainerRequest",
        "PauseContainer": "containers pause PauseContainerRequest",
        "ResumeContainer": "containers resume ResumeContainerRequest",
        "RemoveStaleVirtiofsShareMounts": "volumes remove_stale_share_mounts RemoveStaleVirtiofsShareMountsRequest",
        "GetDiagnosticData": "stats diagnostic_data GetDiagnosticDataRequest",
        "WriteStdin": "processes write_stdin WriteStreamRequest",
        "ReadStdout": "~processes read_stdout ReadStreamRequest",
        "ReadStderr": "~processes read_stderr ReadStreamRequest",
        "CloseStdin": "processes close_stdin CloseStdinRequest",
        "TtyWinResize": "processes resize_terminal TtyWinResizeRequest",
        "UpdateInterface": "network update_interface UpdateInterfaceRequest",
        "UpdateRoutes": "network update_routes UpdateRoutesRequest",
        "ListInterfaces": "network list_interfaces ListInterfacesRequest",
        "ListRoutes": "network list_routes ListRoutesRequest",
        "AddARPNeighbors": "network add_neighbors AddARPNeighborsRequest",
        "GetIPTables": "network get_iptables GetIPTablesRequest",
        "SetIPTables": "network set_iptables SetIPTablesRequest",
        "GetMetrics": "stats metrics GetMetricsRequest",
        "MemAgentMemcgSet": "guest memory_agent MemAgentMemcgConfig",
        "MemAgentCompactSet": "guest memory_agent MemAgentCompactConfig",
        "CreateSandbox": "sandbox create CreateSandboxRequest",
        "DestroySandbox": "sandbox destroy DestroySandboxRequest",
        "OnlineCPUMem": "guest online_cpu_mem OnlineCPUMemRequest",
        "ReseedRandomDev": "guest reseed_random ReseedRandomDevRequest",
        "GetGuestDetails": "guest details GuestDetailsRequest",
        "MemHotplugByProbe": "guest probe_memory MemHotplugByProbeRequest",
        "SetGuestDateTime": "guest set_time SetGuestDateTimeRequest",
        "CopyFile": "volumes copy_file CopyFileRequest",
        "GetOOMEvent": "~stats oom_event GetOOMEventRequest",
        "AddSwap": "guest add_swap AddSwapRequest",
        "AddSwapPath": "guest add_swap_path AddSwapPathRequest",
        "GetVolumeStats": "volumes stats VolumeStatsRequest",
        "ResizeVolume": "volumes resize ResizeVolumeRequest",
        "SetPolicy": "guest set_policy SetPolicyRequest",
    },
}


class CallFailed(Exception):
    """What goes on the wire instead of a reply."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def only_waits(service: str, method: str) -> bool:
    """Whether the call may be given up at any moment without losing anything."""
    return _ROUTES.get(service, {}).get(method, "").startswith("~")


async def call(agent: Agent, service: str, method: str, payload: bytes) -> bytes:
    """The encoded reply. Raises CallFailed and nothing else (but Cancelled)."""
    try:
        methods = _ROUTES.get(service)
        if methods is None:
            raise Unimplemented(f"call {service}/{method}: unknown service")
        route = methods.get(method)
        if route is None:
            raise Unimplemented(f"call {service}/{method}: unknown method")
        module_name, function_name, request_name = route.lstrip("~").split()
        request = decode(request_name, payload)
        module = __import__(f"guest.agent.calls.{module_name}", fromlist=[function_name])
        reply = await getattr(module, function_name)(agent, request)
        return b"" if reply is None else encode(reply)
    except AgentError as error:
        log.info("call failed", method=method, code=error.code, error=error)
        raise CallFailed(error.code, str(error)) from error
    except OSError as error:
        text = f"{method}: {error.filename!r}: {os_cause(error)}" if error.filename else f"{method}: {os_cause(error)}"
        log.warning("call failed", method=method, error=text)
        raise CallFailed(13, text) from error
    except Exception as error:  # the RPC edge: a bug in one call must not end the others
        import traceback

        log.error("call crashed", method=method, error=traceback.format_exc(limit=-6))
        raise CallFailed(13, f"{method}: {type(error).__name__}: {error}") from error


def routes() -> dict[str, dict[str, str]]:
    """The table, for tests that compare it with the protocol."""
    return _ROUTES
