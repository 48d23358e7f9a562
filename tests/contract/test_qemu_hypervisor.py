"""The QEMU driver keeps the contract, with real QEMU under TCG and a kernel of four bytes."""

import os
import shutil
from pathlib import Path

import pytest

from hypervisors.base import Hypervisor
from hypervisors.qemu.vm import QemuVm
from pyshim.cleanup.undo import undo_entry
from pyshim.host.processes.children import Children
from pyshim.model.ledger import Ledger
from pyshim.model.vm import LocalVm
from tests.contract.hypervisor import HypervisorContract, Rig
from tests.fakes.ledger import FakeLedger
from tests.fakes.tiny_kernel import HALT
from tests.fakes.vm_config import bootable

QEMU = "/usr/bin/qemu-system-x86_64"


class QemuRig(Rig):
    def __init__(self, tmp_path: Path, code: str = HALT) -> None:
        self.ledger = FakeLedger(undo_entry)
        self.children = Children()
        self._config = bootable(tmp_path, code, hypervisor_path=QEMU)
        self._fds = len(os.listdir("/proc/self/fd"))

    def hypervisor(self, ledger: Ledger | None = None) -> Hypervisor:
        return QemuVm(ledger=ledger or self.ledger, children=self.children)

    def config(self) -> LocalVm:
        return self._config

    def kill_vmm(self, vm: Hypervisor) -> None:
        os.kill(vm.pid, 9)

    def left_behind(self) -> list[str]:
        """The loop's own descriptors (three) apart, everything is as it was."""
        left = [f"{child.name} {child.pid}" for child in self.children.alive]
        if len(os.listdir("/proc/self/fd")) != self._fds + 3:
            left.append(f"descriptors: {[os.readlink(f'/proc/self/fd/{fd}') for fd in self._open_fds()]}")
        return left + ([self._config.vm_dir] if os.path.exists(self._config.vm_dir) else [])

    def _open_fds(self) -> list[str]:
        return [fd for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")]


@pytest.mark.skipif(shutil.which(QEMU) is None, reason=f"needs {QEMU}")
class TestQemuHypervisor(HypervisorContract):
    @pytest.fixture
    def rig(self, tmp_path: Path) -> Rig:
        return QemuRig(tmp_path)
