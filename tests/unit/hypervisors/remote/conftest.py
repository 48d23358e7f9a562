"""A remote service in threads, a ledger that undoes, and the driver run against them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from hypervisors.remote.vm import RemoteHypervisor
from pyshim.cleanup.undo import undo_entry
from pyshim.model.ledger import ResourceKind
from pyshim.model.remote_vms import RemoteServiceConfig
from pyshim.model.vm import RemoteVm
from tests.fakes.ledger import FakeLedger
from tests.fakes.remote_service import FakeRemoteService
from tests.fakes.vm_config import remote_vm_config

VM = "pod1"
REMOTE = ResourceKind.REMOTE_VM
LONG_S = 60.0
"""Longer than any call here takes on a busy machine."""
SHORT_S = 0.3
"""For calls that are never answered."""


@pytest.fixture
def service(tmp_path: Path) -> Iterator[FakeRemoteService]:
    with FakeRemoteService(str(tmp_path)) as service:
        yield service


@pytest.fixture(autouse=True)
def graves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of this test's tombstones."""
    monkeypatch.setattr("pyshim.cleanup.lost_vms.LOST_VMS", f"{tmp_path}/lost-vms")
    return tmp_path / "lost-vms"


@pytest.fixture
def ledger() -> FakeLedger:
    """Undoes as the daemon's does."""
    return FakeLedger(undo=lambda entry: undo_entry(entry, timeout_s=1))


def config(service: FakeRemoteService, *, timeout_s: float = LONG_S, stop_timeout_s: float = LONG_S) -> RemoteVm:
    found = RemoteServiceConfig(
        socket_path=service.path, annotations={"a": "1", "b": ""}, timeout_s=timeout_s, stop_timeout_s=stop_timeout_s
    )
    return remote_vm_config(found, netns_path="/proc/self/ns/net")


async def live(service: FakeRemoteService, ledger: FakeLedger) -> None:
    """One VM from `create` to `stop`, as it should go."""
    vm = RemoteHypervisor(ledger=ledger)
    await vm.create(config(service))
    await vm.start()
    await vm.stop()


def held_state(ledger: FakeLedger) -> object:
    entry = ledger.held.get((REMOTE, VM))
    return entry and entry.detail["state"]
