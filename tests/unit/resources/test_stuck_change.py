"""A change the kernel does not answer: its caller gets an answer all the same, and the ledger does not forget it."""

import asyncio
import os
import threading
from pathlib import Path

import pytest

from pyshim.cleanup.undo import undo_entry
from pyshim.host import threads
from pyshim.host.processes.children import Children
from pyshim.model.errors import FailedPrecondition
from pyshim.model.ledger import LedgerEntry, ResourceKind
from pyshim.model.volumes import HostMount, TargetKind
from pyshim.resources import linux
from pyshim.resources.linux import LinuxHost


async def test_a_mount_that_never_ends_is_given_up_and_not_released_until_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)

    def dead_server(mount: HostMount) -> None:
        gate.read_bytes()

    monkeypatch.setattr(linux, "perform_mount", dead_server)
    monkeypatch.setattr(threads, "LAST_WAIT_S", 0.05)
    target = tmp_path / "target"
    mount = HostMount(
        type="nfs",
        source="server:/",
        target=str(target),
        target_kind=TargetKind.DIRECTORY,
        options=(),
        propagation=None,
        beneath=None,
    )
    entry = LedgerEntry(kind=ResourceKind.MOUNT, key=str(target))

    host = LinuxHost(children=Children(), undo_entry=undo_entry, template_maker="")
    mounting = asyncio.ensure_future(host.mount(mount))
    writer = await asyncio.to_thread(os.open, gate, os.O_WRONLY)
    mounting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await mounting

    with pytest.raises(FailedPrecondition, match=f"release mount '{target}': an earlier change of it has not ended"):
        await host.undo(entry)

    os.close(writer)  # it ends after all
    async with asyncio.timeout(30):
        while True:
            try:
                return await host.undo(entry)
            except FailedPrecondition:
                await asyncio.sleep(0.01)


async def test_many_unmounts_that_a_dead_server_holds_up_are_under_way_at_the_same_time() -> None:
    """More than the loop's executor has threads: each release ends only once all have begun."""
    entries = [LedgerEntry(kind=ResourceKind.MOUNT, key=f"/mnt/{number}") for number in range(40)]
    begun = threading.Barrier(len(entries))

    def held_up(_: LedgerEntry) -> None:
        begun.wait(30)

    host = LinuxHost(children=Children(), undo_entry=held_up, template_maker="")
    await asyncio.gather(*map(host.undo, entries))
