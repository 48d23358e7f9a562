"""A sandbox's cgroups on fakes."""

from collections.abc import Mapping
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace

from pyshim.config.load import build_config
from pyshim.config.sources import Source
from pyshim.model.host_facts import CgroupMode
from pyshim.model.ids import SandboxId
from pyshim.model.sizing import SavedPlacement, SizingRecord, dimension
from pyshim.model.vm import GuestNode
from pyshim.resources.cgroups.live import SandboxCgroups
from pyshim.resources.cgroups.plan.cgroups import cgroup_plan
from tests.fakes.cgroups import FakeCgroups
from tests.fakes.host import FakeHost, FakeRecords
from tests.fakes.ledger import FakeLedger
from tests.unit.pod.conftest import FACTS


def sizing_record(vcpus: str) -> SizingRecord:
    def made(value: str) -> Any:
        return dimension(
            base=Fraction(value),
            base_source="",
            requested=Fraction(0),
            requested_source="",
            unit=1,
            least=(1, ""),
            most=(1 << 20, ""),
        )

    return SizingRecord(policy="sum", vcpus=made(vcpus), memory_mib=made("256"), warnings=())


class Rig:
    """A sandbox's cgroups on fakes; `threads` is what the VMM answers."""

    def __init__(
        self,
        mode: CgroupMode = CgroupMode.V1,
        *,
        placement: SavedPlacement | None = None,
        nodes: tuple[GuestNode, ...] = (),
        **runtime: Any,
    ) -> None:
        qemu = {"path": "/q", "kernel": "/k", "image": "/i", "virtio_fs_daemon": "/v"}
        tables = {"hypervisor": {"qemu": qemu}, "agent": {}, "runtime": runtime}
        self.config = config = build_config(Source(path="/etc/test.toml", directory="/etc", document=tables))
        self.plan = cgroup_plan(
            sandbox_id=SandboxId("s1"), cgroups_path="/pod1/c1", config=config, host=replace(FACTS, cgroup_mode=mode)
        )
        self.host = FakeCgroups(lambda _step: None)
        self.records = FakeRecords(FakeHost())
        self.records.ledger = self.ledger = FakeLedger(lambda entry: self.host.release(entry.key))  # type: ignore[assignment]
        self.threads: tuple[int, ...] = (71,)
        self.pid = 50
        self.helper_pids: tuple[int, ...] = ()
        self.changes = 0
        self.record = sizing_record("1")
        plan: Any = SimpleNamespace(
            config=config,
            sandbox_id="s1",
            cgroups=self.plan,
            sizing=self.record,
            placement=placement,
            numa=nodes,
            numa_why="as on the host" if nodes else "",
        )
        self.cgroups = SandboxCgroups(plan=plan, host=self.host, records=self.records, on_change=self._changed)

    async def vcpu_thread_ids(self) -> tuple[int, ...]:
        return self.threads

    def _changed(self) -> None:
        self.changes += 1

    async def start(self) -> None:
        await self.cgroups.enter()
        async with self.cgroups.starting_vmm():
            self.host.history.append("vmm is made")
        await self.cgroups.restrict_devices()
        await self.place()

    async def place(self) -> None:
        hypervisor: Any = self
        await self.cgroups.place(hypervisor, 40)

    async def fit(self, *containers: Mapping[str, Any], record: SizingRecord | None = None) -> None:
        await self.cgroups.fit(containers, record or self.record)

    def written(self, file: str) -> list[str]:
        return [value for _, name, value in self.host.settings if name == file]
