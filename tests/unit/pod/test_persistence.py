"""The state on disk is enough for a clean-up after a crash, at each moment."""

import asyncio

from pyshim.model.ledger import ResourceKind
from pyshim.model.snapshot import SandboxStatus
from pyshim.model.task import RootfsMount, Status
from pyshim.pod.snapshot import AFTER_REPLY_S, SavedState
from tests.fakes.host import FakeRecords
from tests.unit.pod.conftest import MEMBER, PIPES, SANDBOX, Stack, until

VOLUME = {"destination": "/data", "type": "bind", "source": "/srv/data", "options": ["rbind"]}
OVERLAY = RootfsMount(type="overlay", source="overlay", target="", options=("lowerdir=/a:/b",))


def status(stack: Stack) -> SandboxStatus:
    return stack.records[-1].snapshots[-1].status


async def test_every_effect_on_the_host_finds_its_intent_written(stack: Stack) -> None:
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
    points = [key for key in added if "/mounts/app" in key]
    assert len(points) == 3  # the container's directory, the root file system in it, the volume

    await stack.pod.delete(app, None)

    assert [(entry.kind, entry.key) for entry in stack.records[-1].ledger.entries] == before


async def test_the_state_on_disk_follows_the_sandbox(stack: Stack) -> None:
    container = await stack.create("c1", ["sleep"], PIPES)
    snapshots = stack.records[-1].snapshots
    assert snapshots[0].status is SandboxStatus.CREATING
    await asyncio.sleep(2 * AFTER_REPLY_S)
    assert (status(stack), snapshots[-1].vmm_pid) == (SandboxStatus.READY, stack.hypervisors[0].pid)

    await stack.pod.start(container, None)
    await asyncio.sleep(2 * AFTER_REPLY_S)
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
    await asyncio.sleep(2 * AFTER_REPLY_S)

    assert [snapshot.status for snapshot in snapshots] == [SandboxStatus.CREATING, SandboxStatus.RUNNING]


async def test_a_pod_that_ends_before_its_start_was_written_is_not_written_again(stack: Stack) -> None:
    container = await stack.create("c1", ["sleep"])
    await stack.delete_last(container)
    records = stack.records[-1]
    assert records.removed
    before = len(records.snapshots)
    await asyncio.sleep(2 * AFTER_REPLY_S)

    assert len(records.snapshots) == before


async def test_an_exec_costs_no_write(stack: Stack) -> None:
    container = await stack.run("c1", ["sleep"])
    await asyncio.sleep(2 * AFTER_REPLY_S)
    before = len(stack.records[-1].snapshots)

    exec_id = await stack.exec(container, "e1", ["exit", "0"])
    await stack.pod.start(container, exec_id)
    await stack.pod.wait(container, exec_id)
    await stack.pod.delete(container, exec_id)
    await asyncio.sleep(2 * AFTER_REPLY_S)

    assert len(stack.records[-1].snapshots) == before


async def test_a_delayed_write_does_not_follow_the_removal(stack: Stack) -> None:
    """The state may stay on disk, since something is held; then the next sandbox of the name writes there."""
    await stack.run("c1", ["sleep"])
    records = FakeRecords(stack.host)
    saved = SavedState(records, lambda: stack.records[-1].snapshots[-1])
    saved.save()
    saved.save_soon()

    saved.remove()
    saved.save_soon()
    await asyncio.sleep(2 * AFTER_REPLY_S)

    assert len(records.snapshots) == 1


async def test_why_a_sandbox_was_lost_is_on_disk(stack: Stack) -> None:
    container = await stack.run("c1", ["sleep"])

    stack.hypervisors[0].die("qemu was killed by SIGKILL")
    await stack.pod.wait(container, None)

    last = stack.records[-1].snapshots[-1]
    assert (last.status, last.failure) == (SandboxStatus.STOPPED, "qemu was killed by SIGKILL")


async def test_the_state_names_the_vmm_and_virtiofsd_as_kata_does(stack: Stack) -> None:
    await stack.create("c1", ["sleep"])
    await asyncio.sleep(2 * AFTER_REPLY_S)

    hypervisor = stack.records[-1].snapshots[-1].hypervisor

    assert (hypervisor["Pid"], hypervisor["VirtiofsDaemonPid"]) == (stack.hypervisors[0].pid, 77)
