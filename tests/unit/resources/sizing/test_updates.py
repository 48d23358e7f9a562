"""Update of a container's resources: the VM grows before the guest's limits and shrinks after them; on fakes."""

import asyncio
from contextlib import nullcontext
from typing import Any

import pytest

from pyshim.model.errors import FailedPrecondition, NotFound, ShimError
from pyshim.model.ids import ContainerId
from pyshim.model.mounts import SourceKind
from pyshim.model.task import Status
from pyshim.model.units import MIB
from pyshim.model.volumes import EmptyDir, SourceFacts
from tests.unit.pod.conftest import Stack, until

from .resizable_pod import add, document, resources, settled, start_pod


async def test_an_update_grows_first_and_shrinks_after_the_guests_limits(stack: Stack) -> None:
    await start_pod(stack, enable_virtio_mem=True)
    container = await add(stack, "a", resources(cpus=1, mib=256))
    vm = stack.hypervisors[0]
    stack.agent.held["UpdateContainer"] = asyncio.Event()

    growing = asyncio.ensure_future(stack.pod.update(container, resources(cpus=2, mib=512)))
    await until(lambda: stack.agent.calls[-1] == "UpdateContainer")
    assert (vm.vcpus, vm.memory_mib) == (3, 1024)
    stack.agent.held["UpdateContainer"].set()
    await growing
    stack.agent.held["UpdateContainer"].clear()
    shrinking = asyncio.ensure_future(stack.pod.update(container, resources(cpus=0.5, mib=128)))
    await until(lambda: stack.agent.calls[-1] == "UpdateContainer" and not growing.cancelled())
    assert (vm.vcpus, vm.memory_mib) == (3, 1024), "the guest's limits are lowered before its memory goes"
    stack.agent.held["UpdateContainer"].set()
    await shrinking

    await settled(stack, 2, 640)


async def test_an_update_sends_all_limits_and_zero_means_as_before(stack: Stack) -> None:
    await start_pod(stack)
    asked = resources(cpus=1, mib=256)
    asked["cpu"]["shares"] = 512
    container = await add(stack, "a", asked)

    await stack.pod.update(container, {"cpu": {"quota": 50_000, "period": 0}, "memory": {"limit": 0}})

    sent = stack.agent.updates[-1].resources
    assert (sent.CPU.Quota, sent.CPU.Period, sent.CPU.Shares, sent.Memory.Limit) == (50_000, 100_000, 512, 256 * MIB)


async def test_an_update_the_guest_refuses_counts_for_nothing(stack: Stack) -> None:
    await start_pod(stack, enable_virtio_mem=True)
    container = await add(stack, "a", resources(cpus=1, mib=128))
    stack.agent.failures["UpdateContainer"] = (13, "busy")

    with pytest.raises(ShimError, match="busy"):
        await stack.pod.update(container, resources(cpus=3, mib=512))

    await settled(stack, 2, 640)
    assert stack.hypervisors[0].vcpus == 2


@pytest.mark.parametrize("update", [{"cpu": {"shares": 2048}}, resources(cpus=2, mib=512)], ids=["same", "larger"])
@pytest.mark.parametrize("refused", [False, True], ids=["carried out", "refused"])
async def test_what_a_container_asks_for_after_an_update_is_on_disk(
    update: dict[str, Any], refused: bool, stack: Stack
) -> None:
    await start_pod(stack, enable_virtio_mem=True)
    container = await add(stack, "a", resources(cpus=1, mib=256))
    if refused:
        stack.agent.failures["UpdateContainer"] = (13, "busy")

    with pytest.raises(ShimError, match="busy") if refused else nullcontext():
        await stack.pod.update(container, update)

    assert stack.pod._sandbox is not None
    (on_disk,) = (each for each in stack.records[-1].snapshots[-1].containers if each.container_id == container)
    assert on_disk.resources == stack.pod._sandbox.resizer.asked(container)
    assert (on_disk.resources == resources(cpus=1, mib=256)) == refused


async def test_a_container_that_has_ended_asks_for_nothing_on_disk(stack: Stack) -> None:
    stack.document = document(static=True)
    container = await stack.run("c1", ["sleep"], linux={"resources": resources(cpus=1, mib=256)})

    await stack.end(container)

    (on_disk,) = stack.records[-1].snapshots[-1].containers
    assert (on_disk.status, on_disk.resources) == (Status.STOPPED, {})


async def test_a_static_vm_refuses_an_update_beyond_its_size_and_stays_as_it_is(stack: Stack) -> None:
    stack.document = document(static=True)
    spec = {"linux": {"resources": resources(cpus=1, mib=256)}}
    container = await stack.run("c1", ["sleep"], **spec)
    vm = stack.hypervisors[0]

    await stack.pod.update(container, resources(cpus=2, mib=700))
    assert stack.agent.updates[-1].resources.Memory.Limit == 700 * MIB
    with pytest.raises(FailedPrecondition, match="3 CPUs for all containers are more than the 2 vCPUs"):
        await stack.pod.update(container, resources(cpus=3))
    with pytest.raises(FailedPrecondition, match="800 MiB for all containers are more than the 768 MiB"):
        await stack.pod.update(container, resources(mib=800))

    assert len(stack.agent.updates) == 1
    assert vm.resizes == []
    assert stack.agent.calls.count("GetGuestDetails") <= 1, "the container's streams ask once"


async def test_a_static_vm_takes_any_cpu_set_that_the_kubelet_gives_it(stack: Stack) -> None:
    """The static CPU manager gives a container without CPUs of its own all that are shared, again and again."""
    stack.document = document(static=True)
    container = await stack.run("c1", ["sleep"], linux={"resources": resources(mib=256)})

    await stack.pod.update(container, {"cpu": {"cpus": "0-1"}})

    assert stack.agent.updates[-1].resources.CPU.Cpus == "", "the host's CPUs mean nothing to the guest"


async def test_a_container_that_ends_during_its_update_counts_no_longer(stack: Stack) -> None:
    await start_pod(stack, enable_virtio_mem=True)
    container = await add(stack, "a", resources(mib=100))
    held = stack.agent.held["UpdateContainer"] = asyncio.Event()
    stack.agent.failures["UpdateContainer"] = (5, "no such container")
    updating = asyncio.ensure_future(stack.pod.update(container, resources(cpus=2, mib=600)))
    await until(lambda: stack.agent.calls[-1] == "UpdateContainer")

    await stack.agent.processes["a", "a"].end(0)
    await stack.pod.wait(container, None)
    held.set()
    with pytest.raises(NotFound):
        await updating

    await settled(stack, 1, 512)
    with pytest.raises(FailedPrecondition):
        await stack.pod.update(container, resources(cpus=1))


def memory_volume(size_mib: int) -> SourceFacts:
    return SourceFacts(
        kind=SourceKind.DIRECTORY,
        fs_type="tmpfs",
        size_bytes=size_mib * MIB,
        mode=0o777,
        gid=7,
        empty_dir=EmptyDir(path=VOLUME, sub_path="", in_memory=True),
    )


VOLUME = "/var/lib/kubelet/pods/p/volumes/kubernetes.io~empty-dir/cache"
CACHE = {"destination": "/cache", "type": "bind", "source": VOLUME, "options": ["rbind"]}


async def pod_with_a_memory_volume(stack: Stack) -> ContainerId:
    stack.document = document(static=True)
    stack.host.sources[VOLUME] = memory_volume(64)
    return await stack.run("c1", ["sleep"], mounts=[CACHE], linux={"resources": resources(mib=256)})


async def test_a_memory_volume_is_as_large_as_the_kubelets_after_an_update(stack: Stack) -> None:
    container = await pod_with_a_memory_volume(stack)
    (made,) = (each for each in stack.agent.containers["c1"].storages if each.driver == "ephemeral")

    stack.host.sources[VOLUME] = memory_volume(128)
    await stack.pod.update(container, resources(mib=300))

    (resized,) = stack.agent.tmpfs_updates
    assert (resized.mount_point, resized.fstype) == (made.mount_point, "tmpfs")
    assert list(resized.options) == ["remount", f"size={128 * MIB}", "fsgid=7"]
    assert stack.agent.calls.index("UpdateContainer") < stack.agent.calls.index("UpdateEphemeralMounts")


async def test_a_memory_volume_that_cannot_be_resized_fails_no_update(stack: Stack) -> None:
    container = await pod_with_a_memory_volume(stack)
    stack.agent.failures["UpdateEphemeralMounts"] = (13, "EINVAL")

    await stack.pod.update(container, resources(mib=300))
    stack.host.sources[VOLUME] = SourceFacts(kind=SourceKind.MISSING)
    await stack.pod.update(container, resources(mib=310))

    assert stack.agent.calls.count("UpdateEphemeralMounts") == 1
    assert stack.agent.updates[-1].resources.Memory.Limit == 310 * MIB
