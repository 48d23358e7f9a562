"""Numbers and events: container statistics, OOM events, metrics text, diagnostic data."""

from __future__ import annotations

from protos.agent import agent_pb2 as pb

from guest.agent.calls import metrics
from guest.agent.container.cgroup import cgroup_stats
from guest.agent.container.container import Containers
from guest.agent.container.oom import OomEvents
from guest.agent.errors import InvalidArgument, NotFound, os_cause

# Kubernetes cuts termination messages at this size.
_MAX_TERMINATION_BYTES = 4096
_TERMINATION_PATH = "io.kubernetes.container.terminationMessagePath"


class StatsCalls:
    def __init__(self, *, containers: Containers, oom_events: OomEvents) -> None:
        self._containers = containers
        self._oom_events = oom_events

    async def container(self, request: pb.StatsContainerRequest) -> pb.StatsContainerResponse:
        found = self._containers.find(request.container_id)
        cgroup = cgroup_stats(found.cgroup) if found.cgroup else None
        return pb.StatsContainerResponse(network_stats=_network(), cgroup_stats=cgroup)

    async def oom_event(self, request: pb.GetOOMEventRequest) -> pb.OOMEvent:
        """The next container that lost a process to the OOM killer; waits for one."""
        return pb.OOMEvent(container_id=await self._oom_events.next())

    async def metrics(self, request: pb.GetMetricsRequest) -> pb.Metrics:
        return pb.Metrics(metrics=metrics.text())

    async def diagnostic_data(self, request: pb.GetDiagnosticDataRequest) -> pb.GetDiagnosticDataResponse:
        """`termination_log`: what the container wrote to its termination message file, at most 4 KiB; "" without it."""
        if request.log_type != "termination_log":
            raise InvalidArgument(f"get diagnostic data: unknown log type {request.log_type!r}")
        doing = f"get diagnostic data of {request.container_id!r}"
        spec = self._containers.find(request.container_id).spec
        path = spec.Annotations.get(_TERMINATION_PATH)
        if path is None:
            raise NotFound(f"{doing}: no annotation {_TERMINATION_PATH!r}")
        source = next((mount.source for mount in spec.Mounts if mount.destination == path), None)
        if source is None:
            raise NotFound(f"{doing}: nothing is mounted at {path!r}")
        try:
            with open(source, "rb") as file:
                data = file.read(_MAX_TERMINATION_BYTES)
        except FileNotFoundError:
            data = b""
        except OSError as error:
            raise NotFound(f"read {source!r}: {os_cause(error)}") from error
        return pb.GetDiagnosticDataResponse(data=data.decode("utf-8", "replace"))


def _network() -> list[pb.NetworkStats]:
    """Counters of the guest's interfaces but loopback: the pod's network is the guest's. Source: proc(5), net/dev."""
    stats = []
    with open("/proc/self/net/dev", encoding="ascii", errors="replace") as file:
        for line in file:
            name, separator, rest = line.partition(":")
            values = [int(value) for value in rest.split() if value.isdigit()]
            if separator and len(values) >= 12 and name.strip() != "lo":
                keys = [f"{way}_{what}" for way in ("rx", "tx") for what in ("bytes", "packets", "errors", "dropped")]
                counters = dict(zip(keys, values[0:4] + values[8:12], strict=True))
                stats.append(pb.NetworkStats(name=name.strip(), **counters))
    return stats
