"""The state on disk: enough for a clean-up after a crash, in as few writes as can be, and readable by Kata."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyshim.model.config import Config
from pyshim.model.ids import SandboxId
from pyshim.model.ledger import ResourceKind
from pyshim.model.sandbox import SandboxStatus
from pyshim.model.task import RootfsMount, Status
from pyshim.model.vm import BlockDevice, GuestLocation
from pyshim.pod.plan.kata_state import kata_device
from pyshim.pod.snapshot import SAVE_DELAY_S, SavedState
from pyshim.resources.volumes.plan.disks import disk, vhost_user_disk
from pyshim.state import store as state_store
from pyshim.state.records import SandboxRecords
from pyshim.state.schema import ShimRecord
from pyshim.state.store import StateStore
from tests.fakes.clock import run_fast_forward
from tests.fakes.host import FakeRecords
from tests.fakes.inputs import config
from tests.unit.pod.conftest import DOCUMENT, MEMBER, PIPES, SANDBOX, Stack, until
from tests.unit.state.kata_shape import DEVICE_STATE, check

VOLUME = {"destination": "/data", "type": "bind", "source": "/srv/data", "options": ["rbind"]}
OVERLAY = RootfsMount(type="overlay", source="overlay", target="", options=("lowerdir=/a:/b",))


def status(stack: Stack) -> SandboxStatus:
    return stack.records[-1].snapshots[-1].status


async def test_every_intent_is_written_before_its_effect_on_the_host(stack: Stack) -> None:
    seen: list[str] = []

    def intended(effect: str, path: str) -> None:
        seen.append(effect)
        entries = stack.records[-1].ledger.entries
        if effect == "mount":
            assert (ResourceKind.MOUNT, path) in [(entry.kind, entry.key) for entry in entries]
        if effect == "monitor":
            assert (ResourceKind.SOCKET, path) in [(entry.kind, entry.key) for entry in entries]
            return
        directories = [entry.key for entry in entries if entry.kind is ResourceKind.DIRECTORY]
        bundle = path.startswith("/bundles/")
        assert bundle or any(path == above or path.startswith(f"{above}/") for above in directories)

    stack.host.before_effect = intended
    request = stack.request("c1", ["sleep"], mounts=[VOLUME])
    await stack.pod.create(stack.with_rootfs(request, OVERLAY))

    assert seen.count("mount") == 2 + 1 + 2  # the share's two, the root file system, its share and the volume's


async def test_a_deleted_container_leaves_nothing_in_the_share_of_a_living_pod(stack: Stack) -> None:
    await stack.run("c1", ["sleep"], annotations=SANDBOX)
    before = [(entry.kind, entry.key) for entry in stack.records[-1].ledger.entries]
    app = await stack.run("app", ["exit", "0"], annotations=MEMBER, mounts=[VOLUME])
    await stack.pod.wait(app, None)
    added = {entry.key for entry in stack.records[-1].ledger.entries if (entry.kind, entry.key) not in before}
    points = [key for key in added if "/mounts/" in key]
    assert len(points) == 3  # the container's directory, the root file system in it, the volume

    await stack.pod.delete(app, None)

    assert [(entry.kind, entry.key) for entry in stack.records[-1].ledger.entries] == before
    await asyncio.sleep(0.1)
    assert stack.agent.calls[-1] == "RemoveStaleVirtiofsShareMounts", "the guest holds nothing that has gone"


async def test_the_state_on_disk_follows_the_sandbox(stack: Stack) -> None:
    container = await stack.create("c1", ["sleep"], PIPES)
    snapshots = stack.records[-1].snapshots
    assert snapshots[0].status is SandboxStatus.CREATING
    await asyncio.sleep(2 * SAVE_DELAY_S)
    assert (status(stack), snapshots[-1].vmm_pid) == (SandboxStatus.READY, stack.hypervisors[0].pid)

    await stack.pod.start(container, None)
    await asyncio.sleep(2 * SAVE_DELAY_S)
    assert status(stack) is SandboxStatus.RUNNING

    await stack.pod.pause(container)
    assert status(stack) is SandboxStatus.RUNNING
    assert snapshots[-1].containers[0].status is Status.PAUSED
    await stack.pod.resume(container)
    assert snapshots[-1].containers[0].status is Status.RUNNING

    exit_status = await stack.end(container)
    assert snapshots[-1].containers[0].exit == exit_status

    await until(lambda: status(stack) is SandboxStatus.STOPPED)
    await stack.pod.delete(container, None)
    assert stack.records[-1].removed


async def test_a_create_and_its_start_share_one_write(stack: Stack) -> None:
    container = await stack.create("c1", ["sleep"])
    snapshots = stack.records[-1].snapshots
    assert [snapshot.status for snapshot in snapshots] == [SandboxStatus.CREATING]
    await stack.pod.start(container, None)
    await asyncio.sleep(2 * SAVE_DELAY_S)

    assert [snapshot.status for snapshot in snapshots] == [SandboxStatus.CREATING, SandboxStatus.RUNNING]


async def test_a_pod_that_ends_before_its_start_was_written_is_not_written_again(stack: Stack) -> None:
    container = await stack.create("c1", ["sleep"])
    await stack.delete_last(container)
    records = stack.records[-1]
    assert records.removed
    before = len(records.snapshots)
    await asyncio.sleep(2 * SAVE_DELAY_S)

    assert len(records.snapshots) == before


async def test_an_exec_costs_no_write(stack: Stack) -> None:
    container = await stack.run("c1", ["sleep"])
    await asyncio.sleep(2 * SAVE_DELAY_S)
    before = len(stack.records[-1].snapshots)

    exec_id = await stack.exec(container, "e1", ["exit", "0"])
    await stack.pod.start(container, exec_id)
    await stack.pod.wait(container, exec_id)
    await stack.pod.delete(container, exec_id)
    await asyncio.sleep(2 * SAVE_DELAY_S)

    assert len(stack.records[-1].snapshots) == before


async def test_a_delayed_write_does_not_follow_the_removal(stack: Stack) -> None:
    """The state may stay on disk with what could not be undone; then the next sandbox of the name writes there."""
    await stack.run("c1", ["sleep"])
    records = FakeRecords(stack.host)
    saved = SavedState(records, lambda: stack.records[-1].snapshots[-1])
    saved.save()
    saved.save_soon()

    saved.remove()
    saved.save_soon()
    await asyncio.sleep(2 * SAVE_DELAY_S)

    assert len(records.snapshots) == 1


async def test_why_a_sandbox_was_lost_is_on_disk(stack: Stack) -> None:
    container = await stack.run("c1", ["sleep"])

    stack.hypervisors[0].die("qemu was killed by SIGKILL")
    await stack.pod.wait(container, None)

    last = stack.records[-1].snapshots[-1]
    assert (last.status, last.failure) == (SandboxStatus.STOPPED, "qemu was killed by SIGKILL")


async def test_the_state_names_the_vmm_and_virtiofsd_as_kata_does(stack: Stack) -> None:
    await stack.create("c1", ["sleep"])
    await asyncio.sleep(2 * SAVE_DELAY_S)

    hypervisor = stack.records[-1].snapshots[-1].hypervisor

    assert (hypervisor["Pid"], hypervisor["VirtiofsDaemonPid"]) == (stack.hypervisors[0].pid, 77)


KINDS = {"BlockDrive", "VhostUserDev"}
PLACE = GuestLocation(pci_path="02/01")


def plain(config: Config) -> BlockDevice:
    return disk(config, device_id="d", path="/dev/vg/lv", read_only=True)


def served(config: Config) -> BlockDevice:
    return vhost_user_disk(config, device_id="d", socket="/store/block/sockets/d")


@pytest.mark.parametrize(
    ("make", "kind", "where", "what"),
    [
        (plain, "block", "BlockDrive", {"File": "/dev/vg/lv", "ReadOnly": True}),
        (served, "vhost-user-blk-pci", "VhostUserDev", {"SocketPath": "/store/block/sockets/d", "ReconnectTime": 3}),
    ],
)
def test_a_disk_of_each_kind_has_katas_keys(
    make: Callable[[Config], BlockDevice], kind: str, where: str, what: dict[str, object]
) -> None:
    found: Any = kata_device(make(config(vhost_user_reconnect_timeout_sec=3)), PLACE, 2)

    check(found, DEVICE_STATE)
    assert (found["Type"], found["RefCount"], found["DriverOptions"]["pci-path"]) == (kind, 2, "02/01")
    assert what.items() <= found[where].items()
    assert KINDS & found.keys() == {where}


async def test_katas_own_restore_of_the_sandbox_succeeds(stack: Stack) -> None:
    """Kata refuses an image together with an initrd, and a container without a bundle, and then removes the state."""

    stack.document = {"hypervisor": {"qemu": {**DOCUMENT["hypervisor"]["qemu"], "initrd": "/initrd"}}}
    await stack.run("c1", ["sleep"], annotations=SANDBOX)
    await stack.run("app", ["sleep"], annotations=MEMBER)
    await asyncio.sleep(2 * SAVE_DELAY_S)

    saved = stack.records[-1].snapshots[-1]

    assert (saved.hypervisor_config["ImagePath"], saved.hypervisor_config["InitrdPath"]) == ("/i", "")
    kata = "io.katacontainers.pkg.oci."
    assert [
        (each.annotations[f"{kata}bundle_path"], each.annotations[f"{kata}container_type"]) for each in saved.containers
    ] == [("/bundles/c1", "pod_sandbox"), ("/bundles/app", "pod_container")]


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
        return SandboxRecords(store=store, sandbox_id=SandboxId(sandbox_id), shim=SHIM, undo=stack.host.undo)

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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each write has the whole state, so its bytes may grow with the pod."""
    disk = Disk(monkeypatch)

    table = {others: run_fast_forward(_one_more(others, tmp_path / str(others), disk)) for others in (1, 10, 100)}

    for others, (writes, size_bytes) in table.items():
        print(f"beside {others} containers: {writes} writes, {size_bytes} B")
    assert len({writes for writes, _ in table.values()}) == 1
    assert table[100][1] <= 10 * table[10][1]
