"""A VM that follows its containers, and one that does not: order of the steps, limits, failures; on fakes."""

import asyncio
import json

import pytest

from pyshim.model.errors import Cancelled, InvalidArgument, NotFound, ShimError
from pyshim.model.ids import ContainerId
from pyshim.model.units import MIB
from tests.unit.pod.conftest import MEMBER, SANDBOX, Stack, until

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
