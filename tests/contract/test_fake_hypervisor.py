"""The fake keeps the contract, so tests on it mean something."""

from pathlib import Path

import pytest

from hypervisors.base import Hypervisor
from pyshim.model.ledger import Ledger
from pyshim.model.vm import LocalVm
from tests.contract.hypervisor import HypervisorContract, Rig
from tests.fakes.hypervisor import FakeHypervisor
from tests.fakes.ledger import FakeLedger
from tests.fakes.vm_config import bootable


class FakeRig(Rig):
    def __init__(self, tmp_path: Path) -> None:
        self.ledger = FakeLedger()
        self._config = bootable(tmp_path, "", hypervisor_path="/bin/sh")

    def hypervisor(self, ledger: Ledger | None = None) -> Hypervisor:
        return FakeHypervisor(ledger or self.ledger)

    def config(self) -> LocalVm:
        return self._config

    def kill_vmm(self, vm: Hypervisor) -> None:
        assert isinstance(vm, FakeHypervisor)
        vm.die()

    def left_behind(self) -> list[str]:
        return []


class TestFakeHypervisor(HypervisorContract):
    @pytest.fixture
    def rig(self, tmp_path: Path) -> Rig:
        return FakeRig(tmp_path)
