"""Saving a machine and continuing from it: with real QEMU, and as a conversation where a version's words differ."""

import asyncio
import os
import shutil
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from hypervisors.qemu import hotplug
from hypervisors.qemu.cmdline import qemu_argv
from hypervisors.qemu.hotplug import plug_share
from hypervisors.qemu.process import VmStartFailed
from hypervisors.qemu.qmp import QmpError
from hypervisors.qemu.saved_machine import continue_machine, save_machine, saved_memory
from hypervisors.qemu.vm import QemuVm
from pyshim.cleanup.undo import undo_entry
from pyshim.host.fds import OwnedFd
from pyshim.host.processes.children import Children
from pyshim.model.errors import DeadlineExceeded, FailedPrecondition, ShimError, Unavailable
from pyshim.model.vm import GuestLocation, LocalVm, MemoryBacking, ShareDevice
from tests.fakes.ledger import FakeLedger
from tests.fakes.qmp_peer import Answer, QmpPeer
from tests.fakes.tiny_kernel import FLOOD, say
from tests.fakes.vm_config import bootable, with_memory

from .qmp_session import Session

QEMU = "/usr/bin/qemu-system-x86_64"
needs_qemu = pytest.mark.skipif(shutil.which(QEMU) is None, reason=f"needs {QEMU}")


@asynccontextmanager
async def driver() -> AsyncIterator[QemuVm]:
    """A driver that leaves nothing behind."""
    ledger, children = FakeLedger(undo_entry), Children()
    vm = QemuVm(ledger=ledger, children=children)
    try:
        async with asyncio.timeout(120):
            yield vm
    finally:
        await vm.stop()
    assert ledger.held == {}
    assert children.alive == ()


async def printed(vm: QemuVm, text: str) -> None:
    while text not in vm.console_tail():  # noqa: ASYNC110 - the console has no event for us
        await asyncio.sleep(0.02)


@pytest.fixture
def config(tmp_path: Path) -> LocalVm:
    """A machine that says that it boots, and then prints `x` for ever."""
    return bootable(tmp_path, say("begin\n") + FLOOD, is_copyable=True)


@pytest.fixture
def saved(config: LocalVm, tmp_path: Path, runner: asyncio.Runner) -> Path:
    directory = tmp_path / "saved"
    directory.mkdir()
    runner.run(save(config, directory))
    return directory


async def save(config: LocalVm, directory: Path) -> None:
    async with driver() as vm:
        await vm.create(config)
        await vm.start()
        await printed(vm, "xxx")
        await vm.save_machine(str(directory))


@needs_qemu
async def test_several_vms_continue_from_one_saved_machine(saved: Path, config: LocalVm) -> None:
    modes = {path.name: path.stat().st_mode & 0o777 for path in saved.iterdir()}
    assert modes["state"] == 0o600
    assert modes["memory"] in (0o600, 0o644)  # by QEMU's version
    memory = (saved / "memory").stat()
    assert memory.st_size == config.memory.boot_mib << 20
    assert memory.st_blocks * 512 < memory.st_size // 4
    before = (saved / "memory").read_bytes()
    for _ in range(2):
        async with driver() as vm:
            await vm.create(replace(config, saved_machine=str(saved)))
            await vm.start()
            await printed(vm, "xxx")

            assert "begin" not in vm.console_tail()

    assert (saved / "memory").read_bytes() == before, "a clone writes into memory of its own"


@needs_qemu
async def test_clones_that_map_the_saved_memory_write_to_private_copies(saved: Path, config: LocalVm) -> None:
    config = with_memory(replace(config, saved_machine=str(saved)), backing=MemoryBacking.PRIVATE)
    before = (saved / "memory").read_bytes()
    async with driver() as one, driver() as other:
        for vm in (one, other):
            await vm.create(config)
            await vm.start()
            await printed(vm, "xxx")
        maps = [line for line in Path(f"/proc/{one.pid}/maps").read_text().splitlines() if str(saved) in line]

    assert (saved / "memory").read_bytes() == before
    if (saved / "memory").stat().st_mode & 0o004:
        (line,) = maps
        assert line.split()[1] == "rw-p"
    else:
        assert maps == []


@pytest.mark.parametrize(
    ("change", "mode", "maps"),
    [
        pytest.param({"backing": MemoryBacking.PRIVATE}, 0o644, True, id="private"),
        pytest.param({"backing": MemoryBacking.SHARED_MEMFD}, 0o644, False, id="others-map-it"),
        pytest.param({"backing": MemoryBacking.PRIVATE, "reclaim": True}, 0o644, False, id="given-back"),
        pytest.param({"backing": MemoryBacking.PRIVATE}, 0o600, False, id="old-qemu"),
        pytest.param({"backing": MemoryBacking.PRIVATE, "boot_mib": 2}, 0o644, False, id="another-size"),
    ],
)
def test_memory_shared_with_other_programs_is_not_mapped_from_the_saved_file(
    config: LocalVm, tmp_path: Path, change: dict[str, Any], mode: int, maps: bool
) -> None:
    memory = tmp_path / "memory"
    memory.write_bytes(bytes(1 << 20))
    memory.chmod(mode)
    vm = with_memory(replace(config, saved_machine=str(tmp_path)), **{"boot_mib": 1, **change})

    found = saved_memory(vm)

    assert (found is not None) == maps
    argv = qemu_argv(vm, guest_cid=0, image_bytes=0, memory_is_saved=maps)
    (backend,) = (word for word in argv if word.startswith("memory-backend-file"))
    assert backend.endswith("share=off,readonly=on,rom=off" if maps else "share=on")


def cut(path: Path, size: int) -> None:
    os.truncate(path, size)


def overwrite(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"\xff" * 64)


@needs_qemu
@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda saved: cut(saved / "state", 1000), id="cut"),
        pytest.param(lambda saved: cut(saved / "state", 0), id="empty"),
        pytest.param(lambda saved: overwrite(saved / "state", 0), id="other-format"),
        pytest.param(lambda saved: (saved / "state").unlink(), id="no-state"),
        pytest.param(lambda saved: (saved / "memory").unlink(), id="no-memory"),
    ],
)
async def test_after_a_broken_saved_machine_another_vm_can_boot_in_its_place(
    saved: Path, config: LocalVm, damage: Callable[[Path], None]
) -> None:
    damage(saved)

    async with driver() as clone:
        with pytest.raises(VmStartFailed):
            await clone.create(replace(config, saved_machine=str(saved)))
    async with driver() as vm:
        await vm.create(replace(config, is_copyable=False))
        await vm.start()
        await printed(vm, "begin")


@needs_qemu
@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda config: replace(config, bridges=2), id="another-bridge"),
        pytest.param(lambda config: replace(config, entropy_source=""), id="no-entropy-device"),
        pytest.param(lambda config: with_memory(config, boot_mib=512), id="more-memory"),
    ],
)
async def test_the_state_of_another_machine_is_refused_with_qemus_message(
    saved: Path, config: LocalVm, other: Callable[[LocalVm], LocalVm]
) -> None:
    async with driver() as vm:
        with pytest.raises(VmStartFailed, match=r"(?s)continue vm 'pod1' from .*qemu-system-x86_64: "):
            await vm.create(other(replace(config, saved_machine=str(saved))))


@needs_qemu
async def test_a_vm_that_is_not_copyable_cannot_be_saved(config: LocalVm, tmp_path: Path) -> None:
    async with driver() as vm:
        await vm.create(replace(config, is_copyable=False))
        await vm.start()
        with pytest.raises(FailedPrecondition, match="not made to be copied"):
            await vm.save_machine(str(tmp_path))


@pytest.mark.parametrize(
    ("version", "uri"),
    [((7, 2, 0), "fd:saved-machine"), ((8, 2, 0), "file:/dev/fdset/3"), ((10, 0, 0), "file:/dev/fdset/3")],
)
async def test_files_reach_qemu_in_the_way_of_its_version(
    tmp_path: Path, version: tuple[int, int, int], uri: str
) -> None:
    answers: dict[str, Answer] = {
        "query-migrate": lambda peer, request: peer.reply(request, {"status": "completed"}),
        "add-fd": lambda peer, request: peer.reply(request, {"fdset-id": 3, "fd": 9}),
    }

    async with Session(answers) as session:
        session.monitor.version = version
        with OwnedFd(os.memfd_create("memory")) as memory:
            await save_machine(session.monitor, memory, str(tmp_path))
        assert (tmp_path / "memory").stat().st_mode & 0o777 == (0o600 if version < (8, 2) else 0o644)
        await continue_machine(session.monitor, str(tmp_path))

        said = [(each["execute"], each.get("arguments")) for each in session.peer.requests]
        ignore = {"capabilities": [{"capability": "x-ignore-shared", "state": True}]}
        assert said.count(("migrate-set-capabilities", ignore)) == 2
        assert ("migrate", {"uri": uri}) in said
        assert ("migrate-incoming", {"uri": uri}) in said
        assert said.count(("remove-fd", {"fdset-id": 3})) == (2 if uri.startswith("file:") else 0)


async def test_a_failed_save_raises_qemus_error(tmp_path: Path) -> None:
    failed = {"status": "failed", "error-desc": "no space left"}
    answers: dict[str, Answer] = {"query-migrate": lambda peer, request: peer.reply(request, failed)}

    async with Session(answers) as session:
        with OwnedFd(os.memfd_create("memory")) as memory, pytest.raises(QmpError, match="no space left"):
            await save_machine(session.monitor, memory, str(tmp_path))


# -- a share that comes later ------------------------------------------------------------------------------------------


class OneSlot:
    async def plug(self, *_: object) -> GuestLocation:
        return GuestLocation(pci_path="02/01")


def share_at(path: Path) -> ShareDevice:
    return ShareDevice(tag="kataShared", socket_path=str(path), queue_size=1024)


@pytest.mark.parametrize(
    ("started", "error"),
    [
        pytest.param([False, True], None, id="driver-starts"),
        pytest.param([False], DeadlineExceeded, id="no-driver"),
        pytest.param([None], FailedPrecondition, id="old-qemu"),
    ],
)
async def test_a_share_is_plugged_once_the_guests_driver_uses_it(
    tmp_path: Path, started: list[bool | None], error: type[ShimError] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hotplug, "DRIVER_TIMEOUT_S", 0.1)
    said = list(started)

    def status(peer: QmpPeer, request: dict[str, Any]) -> None:
        value = said.pop(0) if len(said) > 1 else said[0]
        peer.reply(request, {} if value is None else {"vhost-started": value})

    with socket.socket(socket.AF_UNIX) as virtiofsd:
        virtiofsd.bind(str(tmp_path / "fs.sock"))
        virtiofsd.listen()
        async with Session({"x-query-virtio-status": status}) as session:
            plugging = plug_share(session.monitor, share_at(tmp_path / "fs.sock"), OneSlot())  # type: ignore[arg-type]
            if error is None:
                assert (await plugging).pci_path == "02/01"
            else:
                with pytest.raises(error):
                    await plugging


async def test_a_share_without_virtiofsd_is_an_error_with_its_socket(tmp_path: Path) -> None:
    async with Session() as session:
        with pytest.raises(Unavailable, match=r"fs\.sock"):
            await plug_share(session.monitor, share_at(tmp_path / "fs.sock"), OneSlot())  # type: ignore[arg-type]
