"""Writes of the state for a container of many volumes."""

import asyncio
from pathlib import Path

import pytest

from pyshim.model.ids import SandboxId
from pyshim.state import store as state_store
from pyshim.state.records import SandboxRecords
from pyshim.state.schema import ShimRecord
from pyshim.state.store import StateStore
from tests.fakes.clock import run_fast_forward
from tests.unit.pod.conftest import MEMBER, SANDBOX, Stack

SHIM = ShimRecord(pid=4711, start_ticks=99, socket="unix:///s", namespace="default")


class Disk:
    """Counts what the store writes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.writes: list[int] = []
        replace = state_store._replace
        monkeypatch.setattr(
            state_store, "_replace", lambda path, body: (self.writes.append(len(body)), replace(path, body))
        )

    def taken(self) -> tuple[int, int]:
        """Writes and bytes since the last call."""
        writes, self.writes = self.writes, []
        return len(writes), sum(writes)


def _stored_in(root: Path) -> tuple[Stack, StateStore]:
    """A pod whose state is written below `root`."""
    stack = Stack()
    store = StateStore(root=str(root))

    async def records(sandbox_id: str) -> SandboxRecords:
        return SandboxRecords(store=store, sandbox_id=SandboxId(sandbox_id), shim=SHIM, release=stack.host.release)

    stack.open_records = records
    return stack, store


async def _create_and_delete(mounts: int, root: Path, disk: Disk) -> tuple[tuple[int, int], tuple[int, int]]:
    """Writes and bytes of a Create with that many volumes, and of the Delete."""
    stack, store = _stored_in(root)
    pod = await stack.run("c1", ["pause"], annotations=SANDBOX)
    disk.taken()
    volumes = [
        {"type": "bind", "source": f"/data/{number}", "destination": f"/mnt/{number}", "options": ["rbind"]}
        for number in range(mounts)
    ]
    app = await stack.run("app", ["sleep"], annotations=MEMBER, mounts=volumes)
    assert len(stack.host.mounts) >= mounts
    created = disk.taken()
    await stack.pod.kill(app, None, 9, True)
    await stack.pod.wait(app, None)
    disk.taken()
    await stack.pod.delete(app, None)
    deleted = disk.taken()
    assert [entry for entry in store.load("c1").ledger if "/app" in entry.key] == []
    await stack.pod.kill(pod, None, 9, True)
    await stack.pod.wait(pod, None)
    disk.taken()
    await stack.delete_last(pod)
    assert disk.taken() == (0, 0), "the state of the sandbox is removed without being written again"
    assert store.sandbox_ids() == ()
    await stack.close()
    return created, deleted


def test_state_writes_of_create_and_delete_grow_with_the_mounts_and_not_with_their_square(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = Disk(monkeypatch)

    table = {
        mounts: run_fast_forward(_create_and_delete(mounts, tmp_path / str(mounts), disk))
        for mounts in (100, 400, 1600)
    }

    for mounts, (created, deleted) in table.items():
        print(f"{mounts} mounts: create {created[0]} writes, {created[1]} B; delete {deleted[0]}, {deleted[1]} B")
    for phase in (0, 1):
        writes = {mounts: costs[phase][0] for mounts, costs in table.items()}
        assert len(set(writes.values())) == 1, f"the number of writes depends on the mounts: {writes}"
        assert writes[100] <= 8
        small, large = table[100][phase][1], table[1600][phase][1]
        assert large <= 16 * small, f"{small} bytes are written for 100 mounts, {large} for 1600"


async def _one_more(containers: int, root: Path, disk: Disk) -> tuple[int, int]:
    """Writes and bytes of a container that is created, started, killed and deleted beside that many others."""
    stack, _ = _stored_in(root)
    await stack.run("c1", ["pause"], annotations=SANDBOX)
    for number in range(containers):
        await stack.run(f"other{number}", ["sleep"], annotations=MEMBER)
    await asyncio.sleep(1)
    disk.taken()
    app = await stack.run("app", ["sleep"], annotations=MEMBER)
    await stack.pod.kill(app, None, 9, True)
    await stack.pod.wait(app, None)
    await stack.pod.delete(app, None)
    await asyncio.sleep(1)
    cost = disk.taken()
    await stack.close()
    return cost


def test_a_containers_life_costs_as_many_writes_in_a_full_pod_as_in_an_empty_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each writes the whole state, of which only what has changed is encoded again."""
    disk = Disk(monkeypatch)

    table = {others: run_fast_forward(_one_more(others, tmp_path / str(others), disk)) for others in (1, 10, 100)}

    for others, (writes, size_bytes) in table.items():
        print(f"beside {others} containers: {writes} writes, {size_bytes} B")
    assert len({writes for writes, _ in table.values()}) == 1
    assert table[100][1] <= 10 * table[10][1]
