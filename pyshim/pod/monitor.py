"""The pod's side of the monitor socket (`seams.MonitorRpc`)."""

from collections.abc import Collection

from pyshim.model.observation import Observation, SizeFigures, Trace
from pyshim.model.oci import PodName
from pyshim.model.seams import Agent, Records
from pyshim.model.volumes import VolumeStats
from pyshim.pod.container import Container
from pyshim.pod.sandbox import Sandbox


class PodMonitor:
    """Answers for `sandbox` and for `containers`, a view of those that exist now."""

    def __init__(
        self,
        sandbox: Sandbox,
        *,
        name: PodName,
        containers: Collection[Container],
        records: Records,
        trace: Trace,
    ) -> None:
        self._sandbox = sandbox
        self._name = name
        self._containers = containers
        self._records = records
        self._trace = trace

    def observe(self) -> Observation:
        vm, config = self._sandbox.vm, self._sandbox.plan.vm
        record = vm.resizer.record
        streams: dict[tuple[str, str], int] = {}
        for container in self._containers:
            bytes_by_stream = container.bytes_by_stream
            for stream in ("stdin", "stdout", "stderr"):
                streams[container.id, stream] = bytes_by_stream[stream]
        return Observation(
            vmm_pid=vm.hypervisor.pid,
            virtiofsd_pid=vm.virtiofsd_pid,
            vcpus=SizeFigures(
                requested=float(record.vcpus.exact),
                booted=config.cpu.boot_vcpus,
                current=vm.resizer.vcpus,
                limit=config.cpu.max_vcpus,
            ),
            memory_mib=SizeFigures(
                requested=float(record.memory_mib.exact),
                booted=config.memory.boot_mib,
                current=vm.resizer.memory_mib,
                limit=config.memory.max_mib or config.memory.boot_mib,
            ),
            containers=len(self._containers),
            ledger=self._records.entry_counts,
            spans=tuple(self._trace.spans),
            streams=streams,
            oom_kills={container.id: container.oom_kills for container in self._containers},
            is_cloned=vm.is_clone,
            missed_checks=vm.health.failed_checks,
        )

    def agent_url(self) -> str:
        return str(self._sandbox.vm.hypervisor.agent_address)

    def name(self) -> PodName:
        return self._name

    @property
    def agent(self) -> Agent:
        return self._sandbox.agent

    async def volume_stats(self, volume_path: str) -> VolumeStats:
        return await self._sandbox.vm.attachments.volume_stats(volume_path, self._sandbox.agent)

    async def resize_volume(self, volume_path: str, size_bytes: int) -> None:
        await self._sandbox.vm.attachments.resize_volume(volume_path, size_bytes, self._sandbox.agent)
