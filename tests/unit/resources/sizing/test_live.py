"""A VM that follows its containers, and one that does not: order of the steps, limits, failures; on fakes."""

import asyncio
import json
import logging
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import pytest
from msgspec.structs import replace

from pyshim.model.errors import Cancelled, FailedPrecondition, InvalidArgument, NotFound, ShimError
from pyshim.model.host_facts import CgroupLimits
from pyshim.model.ids import ContainerId
from pyshim.model.task import Status
from pyshim.model.units import MIB
from pyshim.model.volumes import EmptyDir, SourceFacts, SourceKind
from tests.unit.pod.conftest import MEMBER, SANDBOX, Stack, until
from tests.unit.pod.test_sandbox_calls import IN_POD, POD, request

from .resizable_pod import add, document, granted, resources, settled, sizing, start_pod


async def test_the_vm_has_grown_and_the_guest_uses_it_before_the_container_is_made(stack: Stack) -> None:
    await start_pod(stack)
    vm = stack.hypervisors[0]
    assert vm.resizes == []
    assert sizing(stack)["policy"] == "dynamic"

    await add(stack, "a", resources(cpus=1.5, mib=200))

    assert vm.resizes == [("vcpus", 3), ("memory", 768)]
    assert stack.agent.onlined[-1] == (3, False)
    calls = stack.agent.calls
    assert calls.index("OnlineCPUMem") < calls.index("CreateContainer")
    assert granted(stack) == (3, 768)


async def test_the_hosts_limits_are_raised_before_the_vm_grows_and_lowered_after_it_shrinks(stack: Stack) -> None:
    """Memory that is set aside is charged as it is plugged: under the old limit that would be the VMM's end."""
    qemu = {**document(enable_virtio_mem=True)["hypervisor"]["qemu"]}
    limits = {"static_sandbox_resource_mgmt": False, "sandbox_cgroup_limits": True}
    stack.document = {"hypervisor": {"qemu": qemu}, "runtime": limits}
    await stack.run("c1", ["sleep"], annotations=SANDBOX)
    vm, written = stack.hypervisors[0], stack.host.cgroup_tree.settings

    def last_limit_mib() -> int:
        return next(int(v) for _, file, v in reversed(written) if file == "memory.limit_in_bytes") // MIB

    seen: list[tuple[int, int]] = []
    resize = vm.resize_memory

    async def resized(memory_mib: int) -> int:
        seen.append((memory_mib, last_limit_mib()))
        return await resize(memory_mib)

    vm.resize_memory = resized  # type: ignore[method-assign]
    container = await add(stack, "a", resources(mib=1024))
    assert seen[-1][0] == 1536
    assert seen[-1][1] > 1536
    await stack.pod.kill(container, None, 9, False)
    await until(lambda: vm.memory_mib == 512)
    assert seen[-1][0] == 512
    assert seen[-1][1] > 1536
    await until(lambda: last_limit_mib() < 1536)


async def test_containers_created_together_all_count(stack: Stack) -> None:
    await start_pod(stack)

    await asyncio.gather(*(add(stack, name, resources(cpus=1, mib=128)) for name in ("a", "b", "c")))

    assert granted(stack) == (4, 512 + 3 * 128)
    assert stack.hypervisors[0].vcpus == 4


@pytest.mark.parametrize("end", ["stop", "delete-unstarted"])
async def test_a_container_that_ends_is_no_longer_counted(end: str, stack: Stack) -> None:
    await start_pod(stack, enable_virtio_mem=True)
    spec = {"annotations": MEMBER, "linux": {"resources": resources(cpus=2, mib=300)}}
    container = await stack.create("a", ["sleep"], **spec)
    assert granted(stack) == (3, 896)

    if end == "stop":
        await stack.pod.start(container, None)
        stack.agent.failures["RemoveContainer"] = (13, "not yet")  # the exit alone must do
        await stack.agent.processes["a", "a"].end(0)
        await stack.pod.wait(container, None)
    else:
        await stack.pod.delete(container, None)
    await settled(stack, 1, 512)

    assert stack.hypervisors[0].resizes[-2:] == [("vcpus", 1), ("memory", 512)]


async def test_what_a_guest_keeps_is_recorded_with_a_warning(stack: Stack) -> None:
    await start_pod(stack, enable_virtio_mem=True)
    vm = stack.hypervisors[0]
    vm.takes_cpus_away, vm.guest_keeps_mib = False, 640
    container = await add(stack, "a", resources(cpus=1, mib=384))
    await stack.pod.delete(await _ended(stack, container), None)
    await settled(stack, 2, 640)

    assert sizing(stack)["vcpus"]["limited_by"] == "what is not taken away"
    assert {"2 vCPUs kept, 1 wanted", "640 MiB kept, 512 wanted"} <= set(sizing(stack)["warnings"])


async def _ended(stack: Stack, container: ContainerId) -> ContainerId:
    await stack.end(container)
    return container


async def test_a_guest_without_memory_hotplug_keeps_its_memory(stack: Stack) -> None:
    stack.agent.memory_block_bytes = 0
    await start_pod(stack)

    await add(stack, "a", resources(cpus=1, mib=200))

    assert stack.hypervisors[0].resizes == [("vcpus", 2)]
    assert stack.agent.onlined == [(2, True)]
    assert sizing(stack)["memory_mib"]["limited_by"] == "what the VM was made for"


@pytest.mark.parametrize(
    ("step", "error"),
    [
        pytest.param("resize_vcpus", "resize_vcpus: injected fault", id="vcpus"),
        pytest.param("resize_memory", "resize_memory: injected fault", id="memory"),
        pytest.param("online", "no such cpu", id="online"),
    ],
)
async def test_a_growth_that_fails_fails_the_create_and_is_taken_back(step: str, error: str, stack: Stack) -> None:
    await start_pod(stack, enable_virtio_mem=True)
    if step == "online":
        stack.agent.failures["OnlineCPUMem"] = (13, error)
    else:
        stack.host.faults.plan({step: 1})
    before = list(stack.agent.calls)

    with pytest.raises(ShimError, match=error):
        await add(stack, "a", resources(cpus=1, mib=200))
    await until(lambda: not _shrinking())

    assert "CreateContainer" not in stack.agent.calls[len(before) :]
    vm = stack.hypervisors[0]
    assert (vm.vcpus, vm.memory_mib) == (1, 512)
    stack.agent.failures.clear()
    await add(stack, "a", resources(cpus=1, mib=200))
    assert granted(stack) == (2, 768)


async def test_memory_taken_in_part_before_a_growth_failed_is_taken_back(stack: Stack) -> None:
    await start_pod(stack, enable_virtio_mem=True)
    vm = stack.hypervisors[0]
    vm.guest_takes_mib = 576

    with pytest.raises(ShimError, match="the guest took 576 MiB"):
        await add(stack, "a", resources(cpus=1, mib=200))
    await until(lambda: not _shrinking())

    assert (vm.vcpus, vm.memory_mib) == (1, 512)


async def test_a_guest_without_a_block_size_fails_the_create(stack: Stack) -> None:
    stack.document = document()
    stack.agent.failures["GetGuestDetails"] = (13, "deaf")

    with pytest.raises(ShimError, match="deaf"):
        await stack.run("c1", ["sleep"], linux={"resources": resources(cpus=1)})

    assert stack.hypervisors[0].resizes == []
    assert stack.left() == {}


def _shrinking() -> list[str]:
    return [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("shrink/")]


async def test_a_shrink_that_fails_only_warns_and_the_next_one_succeeds(stack: Stack) -> None:
    await start_pod(stack, enable_virtio_mem=True)
    first = await add(stack, "a", resources(cpus=1, mib=100))
    second = await add(stack, "b", resources(cpus=1, mib=100))
    stack.host.faults.seen.clear()
    stack.host.faults.plan({"resize_vcpus": 1})

    await stack.pod.delete(await _ended(stack, first), None)
    await until(lambda: not _shrinking())
    assert stack.hypervisors[0].vcpus == 3
    await stack.pod.delete(await _ended(stack, second), None)
    await settled(stack, 1, 512)

    assert stack.hypervisors[0].vcpus == 1


async def test_a_container_that_needs_more_does_not_wait_until_a_slow_guest_has_given_all_back(stack: Stack) -> None:
    await start_pod(stack, enable_virtio_mem=True)
    large = await add(stack, "large", resources(mib=1024))
    vm = stack.hypervisors[0]
    gives = asyncio.Event()
    resize = vm.resize_memory

    async def slowly(memory_mib: int) -> int:
        """A block at a time, each when the guest has one."""
        if memory_mib < vm.memory_mib:
            await gives.wait()
            gives.clear()
            vm.guest_keeps_mib = vm.memory_mib - 128
        return await resize(memory_mib)

    vm.resize_memory = slowly  # type: ignore[method-assign]
    await stack.pod.kill(large, None, 9, False)
    await asyncio.sleep(0.1)
    creating = asyncio.ensure_future(add(stack, "next", resources(mib=256)))
    await asyncio.sleep(0.1)
    gives.set()

    await creating

    assert vm.memory_mib == 1536 - 128
    assert "kept" not in str(sizing(stack)["warnings"])
    for _ in range(5):
        gives.set()
        await asyncio.sleep(0.1)
    await settled(stack, 1, 768)


async def test_the_pods_own_container_counts_for_nothing(stack: Stack) -> None:
    stack.document = document()
    pause = {"annotations": SANDBOX, "linux": {"resources": resources(cpus=2, mib=500)}}

    await stack.run("c1", ["sleep"], **pause)

    assert stack.hypervisors[0].resizes == []


async def test_resources_that_make_no_sense_are_refused_before_anything_grows(stack: Stack) -> None:
    await start_pod(stack)

    with pytest.raises(InvalidArgument, match=r"linux\.resources\.cpu\.period is negative"):
        await add(stack, "a", {"cpu": {"period": -1, "quota": 5}})

    assert stack.hypervisors[0].resizes == []
    await add(stack, "b", resources(cpus=1))
    assert granted(stack) == (2, 512)


async def test_an_ended_vm_ends_a_resize_in_words(stack: Stack) -> None:
    await start_pod(stack)
    container = await add(stack, "a", resources(cpus=1))
    stack.hypervisors[0].die("qemu was killed")
    await stack.pod.wait(container, None)

    with pytest.raises(ShimError):
        await stack.pod.update(container, resources(cpus=3))

    assert json.dumps(sizing(stack))


async def test_a_create_given_up_while_the_vm_grows_leaves_the_vm_as_it_was(stack: Stack) -> None:
    await start_pod(stack, enable_virtio_mem=True)
    vm = stack.hypervisors[0]
    vm.may_answer.clear()
    creating = asyncio.ensure_future(add(stack, "a", resources(cpus=1, mib=100)))
    await until(lambda: vm.resizes)

    deleting = asyncio.ensure_future(stack.pod.delete(ContainerId("a"), None))
    await asyncio.sleep(0.01)
    vm.may_answer.set()
    ends = await asyncio.gather(creating, deleting, return_exceptions=True)
    await until(lambda: not _shrinking())

    assert [type(end) for end in ends] == [Cancelled, NotFound]
    assert "CreateContainer" not in stack.agent.calls
    assert (vm.vcpus, vm.memory_mib) == (1, 512)
    assert granted(stack) == (1, 512)


async def test_a_vm_that_does_not_fit_is_never_made(stack: Stack) -> None:
    stack.capacity = replace(stack.capacity, available_mib=100)

    with pytest.raises(FailedPrecondition, match=r"2048 MiB of RAM.*do not fit on this host: less than 128 MiB"):
        await stack.create("c1", ["sleep"])

    assert stack.hypervisors == []
    assert stack.records == []


async def test_a_vm_larger_than_its_cgroup_boots_with_one_warning(
    stack: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    limits = CgroupLimits(memory_bytes=1 << 30, memory_path="/kubepods/pod1", cpu_quota=None, cpu_path="")
    stack.capacity = replace(stack.capacity, cgroup=limits)

    with caplog.at_level(logging.WARNING, "pyshim.pod"):
        await stack.run("c1", ["sleep"])
        await stack.run("c2", ["sleep"], annotations=MEMBER)

    (warning,) = [record for record in caplog.records if record.msg == "capacity"]
    assert "cgroup '/kubepods/pod1' allows" in warning.__dict__["problem"]


async def run_pod(stack: Stack, asked: Mapping[str, Any], **keys: Any) -> None:
    """A pod by the Sandbox API with one container, `app`."""
    stack.document = document(**keys)
    await stack.sandbox_calls.create(request())
    await stack.sandbox_calls.start(POD)
    await stack.run("app", ["sleep"], annotations=IN_POD, linux={"resources": asked})


async def test_the_vm_follows_the_pods_limits(stack: Stack) -> None:
    await run_pod(stack, resources(cpus=1, mib=128), enable_virtio_mem=True)
    assert granted(stack) == (2, 640)

    await stack.sandbox_calls.update(POD, resources(cpus=2.5, mib=512))
    assert granted(stack) == (4, 1024)
    assert stack.agent.onlined[-1] == (4, False)
    assert sizing(stack)["vcpus"]["requested_source"] == "the pod's CPU limit"

    await stack.sandbox_calls.update(POD, resources(cpus=1, mib=256))
    await settled(stack, 2, 768)


async def test_containers_that_ask_for_more_than_their_pod_have_it(stack: Stack) -> None:
    await run_pod(stack, resources(cpus=2, mib=256), enable_virtio_mem=True)

    await stack.sandbox_calls.update(POD, resources(cpus=1, mib=512))

    assert granted(stack) == (3, 1024)


async def test_the_limits_of_a_pod_count_for_the_containers_that_come(stack: Stack) -> None:
    stack.document = document(enable_virtio_mem=True)
    await stack.sandbox_calls.create(request())
    await stack.sandbox_calls.start(POD)

    await stack.sandbox_calls.update(POD, resources(mib=512))
    assert granted(stack) == (1, 512), "no container needs it yet"
    await stack.run("app", ["sleep"], annotations=IN_POD)

    assert granted(stack) == (1, 1024)


async def test_a_vm_of_static_size_takes_updates_up_to_its_size(stack: Stack) -> None:
    await run_pod(stack, {}, static=True)  # 1.5 CPUs and 512 MiB for the pod, by its configuration
    had = granted(stack)

    await stack.sandbox_calls.update(POD, resources(cpus=had[0], mib=had[1]))
    with pytest.raises(FailedPrecondition, match=r"^update sandbox 'p1': 9 CPUs for all containers are more than"):
        await stack.sandbox_calls.update(POD, resources(cpus=9))

    assert granted(stack) == had
    assert stack.hypervisors[0].resizes == []


async def test_a_refused_update_changes_nothing(stack: Stack) -> None:
    await run_pod(stack, resources(cpus=1), enable_virtio_mem=True)
    had, resizes = granted(stack), list(stack.hypervisors[0].resizes)

    with pytest.raises(InvalidArgument, match=r"linux\.resources\.cpu\.period is negative"):
        await stack.sandbox_calls.update(POD, {"cpu": {"period": -1}})

    assert (granted(stack), stack.hypervisors[0].resizes) == (had, resizes)


async def test_an_update_that_fails_is_forgotten(stack: Stack) -> None:
    await run_pod(stack, resources(cpus=1), enable_virtio_mem=True)
    stack.agent.failures["OnlineCPUMem"] = (13, "no")

    with pytest.raises(ShimError, match="no"):
        await stack.sandbox_calls.update(POD, resources(cpus=3))
    del stack.agent.failures["OnlineCPUMem"]

    await settled(stack, 2, 512)


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

    life = stack.pod.life
    assert life is not None
    assert life.sandbox is not None
    (on_disk,) = (each for each in stack.records[-1].snapshots[-1].containers if each.container_id == container)
    assert on_disk.resources == life.sandbox.vm.resizer.asked(container)
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
