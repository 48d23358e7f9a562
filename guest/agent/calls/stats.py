"""Numbers and events: container statistics, OOM events, metrics text."""

from __future__ import annotations

from protos.agent import agent_pb2 as pb

from guest.agent.calls import metrics
from guest.agent.container.cgroup import cgroup_stats
from guest.agent.container.container import Containers
from guest.agent.container.oom import OomEvents


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


def _network() -> list[pb.NetworkStats]:
    """Counters of the guest's interfaces but loopback: the pod's network is the guest's."""
    keys = [f"{way}_{what}" for way in ("rx", "tx") for what in ("bytes", "packets", "errors", "dropped")]
    return [
        pb.NetworkStats(name=name, **dict(zip(keys, counters[0:4] + counters[8:12], strict=True)))
        for name, counters in metrics.interface_counters().items()
        if name != "lo"
    ]
