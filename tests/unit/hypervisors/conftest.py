"""A QEMU driver with all that it may leave behind."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hypervisors.qemu.vm import QemuVm
from pyshim.cleanup.undo import undo_entry
from pyshim.host.processes.children import Children
from pyshim.model.vm import LocalVm, VmExit
from tests.fakes.ledger import FakeLedger
from tests.fakes.tiny_kernel import HALT
from tests.fakes.vm_config import bootable


class Bench:
    """A driver and what it may leave behind."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ledger = FakeLedger(undo_entry)
        self.children = Children()
        self.vm = QemuVm(ledger=self.ledger, children=self.children)

    def config(self, code: str = HALT, **changes: Any) -> LocalVm:
        return bootable(self.directory, code, **changes)

    def vmm(self, script: str) -> str:
        """A program in QEMU's place; `accept()` takes the shim's QMP connection, `greet()` speaks QMP's first words."""
        path = self.directory / "vmm"
        helpers = """import json, os, signal, socket, sys, time
def accept():
    return socket.socket(fileno=3).accept()[0]
def greet():
    qmp = accept()
    qmp.sendall(b'{"QMP": {"version": {"qemu": {"major": 7, "minor": 2, "micro": 0}}, "capabilities": []}}\\r\\n')
    request = json.loads(qmp.recv(65536))
    qmp.sendall(json.dumps({"return": {}, "id": request.get("id")}).encode() + b"\\r\\n")
    return qmp
"""
        path.write_text(f"#!{sys.executable} -IS\n{helpers}{script}\n")
        path.chmod(0o755)
        return str(path)

    async def end_of(self, code: str) -> VmExit:
        """The way in which the VM that boots `code` ends by itself."""
        await self.vm.create(self.config(code))
        await self.vm.start()
        ended = await self.vm.wait()
        await self.vm.stop()
        return ended


@pytest.fixture
def bench(tmp_path: Path, nothing_left: None) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    assert bench.ledger.held == {}
    assert bench.children.alive == ()
    assert not (tmp_path / "vm").exists()
