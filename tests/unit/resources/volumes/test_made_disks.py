"""Disks on files made for them: made once, kept until the sandbox ends, named in the ledger before they exist."""

from types import SimpleNamespace
from typing import Any

import pytest

from pyshim.concurrency.tasks import TaskOwner
from pyshim.concurrency.undo import Undo
from pyshim.model.errors import FailedPrecondition
from pyshim.model.ledger import LedgerEntry, ResourceKind
from pyshim.model.vm import BlockDevice, Device
from pyshim.resources.devices.vm_devices import VmDevices
from pyshim.resources.services import VmServices
from pyshim.resources.volumes.attachments import Attachments
from tests.fakes.disks import disk as fake_disk
from tests.fakes.host import FakeHost, Faults
from tests.fakes.hypervisor import FakeHypervisor
from tests.fakes.ledger import FakeLedger
from tests.fakes.vm_config import vm_config

PATH = "/pod/cache/disk.img"


class _Ledger(FakeLedger):
    def __init__(self, order: list[str]) -> None:
        super().__init__()
        self._order = order

    def acquire(self, *entries: LedgerEntry) -> None:
        super().acquire(*entries)
        self._order.append("hold")


class Rig:
    def __init__(self, faults: Faults | None = None) -> None:
        self.host = FakeHost(faults)
        self.hypervisor = FakeHypervisor(FakeLedger(), files_exist=True)
        self.order: list[str] = []
        self.host.before_effect = lambda effect, _path: self.order.append(effect)
        self.ledger = _Ledger(self.order)
        plan: Any = SimpleNamespace(sandbox_id="pod1")
        services = VmServices(
            plan=plan,
            host=self.host,
            ledger=self.ledger,
            undo=Undo("sandbox 'pod1'"),
            tasks=TaskOwner(),
            vm_devices=VmDevices(self.hypervisor, allow=self._allow),
            on_change=lambda: None,
        )
        self.attachments = Attachments(services)

    async def _allow(self, _device: Device) -> None:
        self.order.append("allow")

    async def start(self) -> None:
        await self.hypervisor.create(vm_config())
        await self.hypervisor.start()


def disk() -> BlockDevice:
    return fake_disk("blk-1", PATH)


async def test_the_file_is_in_the_ledger_before_it_is_made_and_is_made_once() -> None:
    rig = Rig()
    await rig.start()

    first = await rig.attachments.attach_made_disk(disk(), 1 << 20)
    second = await rig.attachments.attach_made_disk(disk(), 1 << 20)
    await rig.attachments.detach("c1")

    assert first == second
    assert rig.order == ["hold", "make_disk_file", "allow"]
    made = LedgerEntry(kind=ResourceKind.FILE, key=PATH, detail={"sandbox": "pod1"})
    assert rig.ledger.history == [("acquire", made)]
    assert disk().id in rig.hypervisor.plugged


async def test_a_file_that_cannot_be_made_is_the_containers_error_and_stays_in_the_ledger() -> None:
    rig = Rig(Faults({"make_disk_file": 1}))
    await rig.start()

    with pytest.raises(FailedPrecondition, match="make_disk_file"):
        await rig.attachments.attach_made_disk(disk(), 1 << 20)

    assert [entry.key for entry in rig.ledger.held.values()] == [PATH]
    assert not rig.hypervisor.plugged
    await rig.attachments.attach_made_disk(disk(), 1 << 20)
