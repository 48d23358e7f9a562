"""Numbers and events: container statistics, OOM events, metrics text, diagnostic data."""

from __future__ import annotations

import os

from guest.agent.calls.containers import find
from guest.agent.errors import InvalidArgument, NotFound, os_cause
from guest.agent.wire.codec import Message

TYPE_CHECKING = False
if TYPE_CHECKING:
    from guest.agent.agent import Agent

# Kubernetes cuts termination messages at this size.
_MAX_TERMINATION_BYTES = 4096
_TERMINATION_PATH = "io.kubernetes.container.terminationMessagePath"


async def container(agent: Agent, request: Message) -> Message:
    found = find(agent, request.container_id)
    reply = Message("StatsContainerResponse", network_stats=_network())
    if found.cgroup:
        from guest.agent.container.cgroup import cgroup_stats

        reply._values["cgroup_stats"] = cgroup_stats(found.cgroup)
    return reply


def _network() -> list[Message]:
    """Counters of the guest's interfaces but loopback: the pod's network is the guest's. Source: proc(5), net/dev."""
    stats = []
    with open("/proc/self/net/dev", encoding="ascii", errors="replace") as file:
        for line in file:
            name, separator, rest = line.partition(":")
            values = rest.split()
            if separator and len(values) >= 12 and name.strip() != "lo":
                rx, tx = [int(value) for value in values[0:4]], [int(value) for value in values[8:12]]
                directions = {}
                for prefix, counted in (("rx", rx), ("tx", tx)):
                    for key, value in zip(("bytes", "packets", "errors", "dropped"), counted, strict=True):
                        directions[f"{prefix}_{key}"] = value
                stats.append(Message("NetworkStats", name=name.strip(), **directions))
    return stats


async def oom_event(agent: Agent, request: Message) -> Message:
    """The next container that lost a process to the OOM killer; waits for one."""
    return Message("OOMEvent", container_id=await agent.oom_events.next())


async def metrics(agent: Agent, request: Message) -> Message:
    from guest.agent.calls.metrics import text

    return Message("Metrics", metrics=text())


async def diagnostic_data(agent: Agent, request: Message) -> Message:
    """`termination_log`: what the container wrote to its termination message file, at most 4 KiB; "" without one."""
    if request.log_type != "termination_log":
        raise InvalidArgument(f"get diagnostic data: unknown log type {request.log_type!r}")
    spec = find(agent, request.container_id).spec
    path = spec.Annotations.get(_TERMINATION_PATH)
    if path is None:
        raise NotFound(f"get diagnostic data of {request.container_id!r}: no annotation {_TERMINATION_PATH!r}")
    source = next((mount.source for mount in spec.Mounts if mount.destination == path), None)
    if source is None:
        raise NotFound(f"get diagnostic data of {request.container_id!r}: nothing is mounted at {path!r}")
    try:
        with open(source, "rb") as file:
            data = file.read(_MAX_TERMINATION_BYTES)
    except FileNotFoundError:
        data = b""
    except OSError as error:
        raise NotFound(f"read {os.fspath(source)!r}: {os_cause(error)}") from error
    return Message("GetDiagnosticDataResponse", data=data.decode("utf-8", "replace"))
