"""The QEMU driver without QEMU: its process is in memory, and a scripted peer in this loop answers QMP."""

import asyncio
import os
import signal
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from hypervisors.qemu.vm import QemuVm
from pyshim.host.processes.children import ChildExit
from pyshim.model.ledger import Ledger, LedgerEntry, ResourceKind
from pyshim.model.units import MIB
from pyshim.model.vm import BlockDevice, Device, GuestLocation, LocalVm, SerialChannel
from tests.fakes.hostile_qmp import value
from tests.fakes.machine import Machine
from tests.fakes.qmp_peer import Answer, QmpPeer, agree

QMP_FD = 3


class Answers(dict[str, Answer]):
    """An honest QEMU's answers; once `lie` is set, it answers every command."""

    def __init__(self, boot_mib: int = 512) -> None:
        slots = [
            {
                "type": "cpu",
                "vcpus-count": 1,
                "props": {"socket-id": number},
                **({} if number else {"qom-path": "/cpu"}),
            }
            for number in range(4)
        ]
        threads = [{"cpu-index": 0, "thread-id": os.getpid()}]
        honest: dict[str, object] = {
            "query-status": {"status": "running"},
            "query-cpus-fast": threads,
            "query-hotpluggable-cpus": slots,
            "query-memory-size-summary": {"base-memory": boot_mib * MIB, "plugged-memory": 0},
            "query-memory-devices": [],
            "add-fd": {"fdset-id": 1, "fd": 9},
        }
        super().__init__({name: value(given) for name, given in honest.items()})
        self.update({"qom-get": _place, "device_del": _unplug})
        self.lie: Answer | None = None

    def get(self, command: str, default: Any = agree) -> Any:
        return self.lie or super().get(command, default)


def _place(peer: QmpPeer, request: dict[str, Any]) -> None:
    peer.reply(request, 8 if request["arguments"]["property"] == "addr" else "/machine/q35/pcie.0")


def _unplug(peer: QmpPeer, request: dict[str, Any]) -> None:
    peer.reply(request, {})
    peer.event("DEVICE_DELETED", {"device": request["arguments"]["id"]})


class QemuProcess:
    """In place of a `Child`. Its pid is that of the test, since its threads have to be there; no signal is sent."""

    name = "qemu"

    def __init__(self, answers: Answers, listener: int) -> None:
        with socket.socket(fileno=os.dup(listener)) as bound:
            bound.setblocking(True)
            connection, _ = bound.accept()
        self.pid = os.getpid()
        self.start_ticks = 1
        self._ended: asyncio.Future[ChildExit] = asyncio.get_running_loop().create_future()
        self._peer = QmpPeer(answers, ours=connection)
        self._closing: asyncio.Task[None] | None = None

    @property
    def exit(self) -> ChildExit | None:
        return self._ended.result() if self._ended.done() else None

    async def wait(self) -> ChildExit:
        return await asyncio.shield(self._ended)

    def kill(self, signal_number: int = signal.SIGKILL) -> bool:
        if self._ended.done():
            return False
        self._ended.set_result(ChildExit(0, signal_number))
        self._closing = asyncio.create_task(self._peer.close(), name="qmp peer ends")
        return True

    async def end(self, *, signal_number: int = signal.SIGKILL, grace_s: float = 0.0) -> ChildExit:
        self.kill(signal_number)
        if self._closing is not None:
            await self._closing
        return await self.wait()

    def describe_exit(self) -> str:
        return f"qemu {self.exit or 'is running'}"


class QemuProcesses:
    """In place of `Children`."""

    def __init__(self, machine: Machine, answers: Answers) -> None:
        self._machine, self._answers = machine, answers

    async def spawn(
        self, argv: tuple[str, ...], *, fds: Mapping[int, int], ledger: Ledger, ledger_key: str, **_more: Any
    ) -> QemuProcess:
        ledger.acquire(LedgerEntry(kind=ResourceKind.PROCESS, key=ledger_key, detail={"program": argv[0]}))
        self._machine.make(ResourceKind.PROCESS, ledger_key)
        return QemuProcess(self._answers, fds[QMP_FD])


class ScriptedQemu(QemuVm):
    """Its files are below `directory`."""

    def __init__(self, ledger: Ledger, machine: Machine, answers: Answers, directory: Path) -> None:
        children: Any = QemuProcesses(machine, answers)
        super().__init__(ledger=ledger, children=children)
        self._directory = directory
        self._file = directory / "file"
        self._file.write_bytes(b"x")

    async def create(self, config: LocalVm) -> None:
        file, vm_dir = str(self._file), str(self._directory / "vm")
        await super().create(
            replace(
                config,
                vm_dir=vm_dir,
                hypervisor_path=file,
                boot=replace(config.boot, kernel=file, image=file),
                agent_channel=SerialChannel(port_name="agent", socket_path=f"{vm_dir}/agent.sock"),
                nics=(),
                # A view is made by a thread, another user is tried by a child: this loop has no time for either.
                is_privileged=True,
                first_user_id=0,
            )
        )

    async def plug(self, device: Device) -> GuestLocation:
        if isinstance(device, BlockDevice):
            device = replace(device, path=str(self._file))
        return await super().plug(device)
