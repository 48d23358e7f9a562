"""Block devices and layers of a container: plugged before the guest hears of them, gone with the container."""

import asyncio
import struct
from typing import Any

import pytest
from msgspec.structs import replace

from pyshim.model.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ShimError,
    Unimplemented,
)
from pyshim.model.ids import ContainerId
from pyshim.model.task import CreateTask, RootfsMount, Status
from pyshim.model.volumes import DirectVolume, SourceFacts, SourceKind
from pyshim.resources.devices import vm_devices
from tests.fakes.vm import FakeVm
from tests.unit.pod.conftest import BUNDLES, MEMBER, SANDBOX, Stack, give_up_while_it_plugs, until

DISK = {"path": "/dev/loop7", "type": "b", "major": 7, "minor": 7}
OTHER = {"path": "/dev/loop8", "type": "b", "major": 7, "minor": 8}


async def test_a_device_is_plugged_and_in_the_guests_request_and_unplugged_with_its_container(stack: Stack) -> None:
    await stack.run("c1", ["sleep"], annotations=SANDBOX)
    app = await stack.run("app", ["exit", "0"], annotations=MEMBER, linux={"devices": [DISK, OTHER]})
    vm = stack.hypervisors[0]
    assert [device.path for device in vm.plugged.values()] == ["/dev/loop7", "/dev/loop8"]
    devices = stack.agent.containers["app"].devices
    assert [(d.id, d.type, d.container_path) for d in devices] == [
        ("0:0", "scsi", "/dev/loop7"),
        ("0:1", "scsi", "/dev/loop8"),
    ]

    await stack.pod.wait(app, None)
    await stack.pod.delete(app, None)

    assert vm.plugged == {}
    assert vm.is_running


async def test_a_guest_unmounts_a_containers_disks_before_it_ends_with_it(stack: Stack) -> None:
    """kata-agent does not unmount at DestroySandbox: written data that is not synced would be lost."""
    app = await stack.run("c1", ["exit", "0"], linux={"devices": [DISK]})

    await stack.pod.wait(app, None)
    await until(lambda: not stack.hypervisors[0].is_running)

    calls = [call for call in stack.agent.calls if call in ("RemoveContainer", "DestroySandbox")]
    assert calls == ["RemoveContainer", "DestroySandbox"]


async def test_a_machine_that_takes_no_devices_says_so(stack: Stack) -> None:
    stack.block_hotplug = False

    with pytest.raises(Unimplemented, match="plug '/dev/loop7'"):
        await stack.create("c1", ["sleep"], linux={"devices": [DISK]})

    assert stack.left() == {}


async def test_a_create_that_is_cancelled_while_it_plugs_unplugs_the_disk(stack: Stack) -> None:
    await stack.run("c1", ["sleep"], annotations=SANDBOX)

    await give_up_while_it_plugs(stack, "app", annotations=MEMBER, linux={"devices": [DISK]})

    assert stack.hypervisors[0].plugged == {}


async def ended_but_its_disk_is_kept(stack: Stack) -> tuple[ContainerId, FakeVm]:
    """An ended container of a pod, in whose VM nothing is unplugged until `may_unplug` is set."""
    await stack.run("c1", ["sleep"], annotations=SANDBOX)
    app = await stack.run("app", ["exit", "0"], annotations=MEMBER, linux={"devices": [DISK]})
    await stack.pod.wait(app, None)
    vm = stack.hypervisors[0]
    vm.may_unplug.clear()
    return app, vm


async def test_a_guest_that_keeps_a_device_does_not_delay_delete(stack: Stack) -> None:
    app, vm = await ended_but_its_disk_is_kept(stack)
    loop = asyncio.get_running_loop()
    began = loop.time()

    await stack.pod.delete(app, None)

    assert loop.time() - began < 10
    assert vm.plugged
    vm.may_unplug.set()
    await until(lambda: not vm.plugged)


async def test_a_guest_that_keeps_a_device_delays_no_other_device(stack: Stack) -> None:
    app, vm = await ended_but_its_disk_is_kept(stack)
    await stack.pod.delete(app, None)

    other = {"annotations": MEMBER, "linux": {"devices": [OTHER]}}
    async with asyncio.timeout(5):
        await stack.run("other", ["sleep"], **other)

    again = {"annotations": MEMBER, "linux": {"devices": [DISK]}}
    creating = asyncio.ensure_future(stack.create("again", ["sleep"], **again))
    await asyncio.sleep(1)
    assert not creating.done(), "what leaves the VM cannot be used before it has left"
    vm.may_unplug.set()
    await creating
    assert [device.path for device in vm.plugged.values()] == ["/dev/loop8", "/dev/loop7"]


async def test_a_disk_that_the_guest_keeps_is_not_given_to_another_container(stack: Stack) -> None:
    await stack.run("c1", ["sleep"], annotations=SANDBOX)
    with_disk = {"annotations": MEMBER, "linux": {"devices": [DISK]}}
    app = await stack.run("app", ["exit", "0"], **with_disk)
    await stack.pod.wait(app, None)
    vm = stack.hypervisors[0]
    vm.keeps_devices = True
    await stack.pod.delete(app, None)
    (kept,) = vm.plugged.values()

    with pytest.raises(DeadlineExceeded, match="did not let go"):
        await stack.create("early", ["sleep"], **with_disk)
    vm.keeps_devices = False
    await stack.run("again", ["sleep"], **with_disk)

    (new,) = vm.plugged.values()
    assert new is not kept
    assert stack.pod.state(ContainerId("again"), None).status is Status.RUNNING


async def test_devices_of_a_lost_vm_do_not_stop_the_clean_up(stack: Stack) -> None:
    container = await stack.run("c1", ["sleep"], linux={"devices": [DISK]})
    stack.hypervisors[0].plugged.clear()  # as of a VMM that has ended
    stack.hypervisors[0].die("killed")
    await stack.pod.wait(container, None)

    assert (await stack.pod.delete(container, None))[1].status == 255
    assert stack.left() == {}


def direct_volume(stack: Stack, device: str = "/dev/vg/lv") -> dict[str, Any]:
    volume = DirectVolume(
        volume_path="/v", record_dir="/records/v", volume_type="block", device=device, fs_type="ext4", options=(),
        metadata={},
    )  # fmt: skip
    stack.host.sources["/v"] = SourceFacts(kind=SourceKind.DIRECTORY, direct=volume)
    return {"destination": "/data", "type": "bind", "source": "/v", "options": ["rbind"]}


async def test_a_direct_volume_is_attached_once_for_all_its_containers(stack: Stack) -> None:
    mount = direct_volume(stack)
    await stack.run("c1", ["sleep"], annotations=SANDBOX)
    for name in ("one", "two"):
        await stack.run(name, ["exit", "0"], annotations=MEMBER, mounts=[mount])
    vm = stack.hypervisors[0]
    assert len(vm.plugged) == 1
    points = {stack.agent.containers[name].storages[0].mount_point for name in ("one", "two")}
    assert len(points) == 1
    assert list(stack.host.images) == ["/records/v/c1"], "the mark at the record"

    await stack.pod.wait(ContainerId("one"), None)
    await stack.pod.delete(ContainerId("one"), None)
    assert len(vm.plugged) == 1

    await stack.pod.wait(ContainerId("two"), None)
    await stack.pod.delete(ContainerId("two"), None)
    assert vm.plugged == {}


async def test_statistics_and_growth_of_a_direct_volume_go_to_the_guest(stack: Stack) -> None:
    mount = direct_volume(stack)
    await stack.run("c1", ["sleep"], mounts=[mount])
    (monitor,) = stack.host.monitors
    assert monitor.path == "/run/vc/sbs/c1/shim-monitor.sock"
    point = stack.agent.containers["c1"].storages[0].mount_point

    stats = await monitor.pod.volume_stats("/v")
    await monitor.pod.resize_volume("/v", 4096)

    assert (stats.usages[0].total, stats.message) == (100, point)
    assert stack.hypervisors[0].resizes == [(next(iter(stack.hypervisors[0].plugged)), 1 << 30)]
    assert stack.agent.volume_sizes == [(point, 4096)]
    with pytest.raises(NotFound, match="'/w'"):
        await monitor.pod.volume_stats("/w")
    with pytest.raises(FailedPrecondition, match="'/dev/vg/lv' has 1073741824"):
        await monitor.pod.resize_volume("/v", 2 << 30)
    with pytest.raises(InvalidArgument, match="-1 bytes"):
        await monitor.pod.resize_volume("/v", -1)


@pytest.mark.parametrize("step", ["write_bytes", "plug"])
async def test_what_a_disk_needed_on_the_host_is_undone(step: str, stack: Stack) -> None:
    mount = direct_volume(stack)
    stack.host.faults.plan({step: 1})

    with pytest.raises(FailedPrecondition, match=step):
        await stack.create("c1", ["sleep"], mounts=[mount])

    assert stack.left() == {}


async def test_a_disk_that_is_attached_read_only_is_not_written_to(stack: Stack) -> None:
    rules = [{"allow": True, "type": "b", "major": 7, "minor": 7, "access": "r"}]
    devices = [DISK, {**DISK, "path": "/dev/again", "minor": 7}]
    linux = {"devices": devices, "resources": {"devices": rules}}
    await stack.run("c1", ["sleep"], linux=linux)

    assert [disk.read_only for disk in stack.hypervisors[0].plugged.values()] == [True]


SHARED = {"namespaces": [{"type": "pid", "path": "/proc/4242/ns/pid"}]}
LAYERS = f"{BUNDLES}/layers"
BASE = f"{LAYERS}/base"


def request(stack: Stack, name: str, *layers: str, annotations: dict[str, str] = MEMBER, **spec: object) -> CreateTask:
    for path in layers:
        stack.host.files.setdefault(path, struct.pack("<1024xI8xB23xI", 0xE0F5E1E2, 12, 1).ljust(4096, b"\0"))
        stack.host.images.setdefault(path, 4096)
    return stack.with_rootfs(
        stack.request(name, ["sleep"], annotations=annotations, **spec),
        *(RootfsMount(type="erofs", source=path, target="", options=("ro", "loop")) for path in layers),
        RootfsMount(
            type="format/mkdir/overlay",
            source="overlay",
            target="",
            options=("workdir=/w", "upperdir=/u", f"lowerdir={{{{ overlay 0 {len(layers) - 1} }}}}"),
        ),
    )


async def pod(stack: Stack) -> ContainerId:
    await stack.pod.create(request(stack, "c1", f"{LAYERS}/pause", annotations=SANDBOX))
    await stack.pod.start(ContainerId("c1"), None)
    return ContainerId("c1")


def plugged(stack: Stack) -> list[str]:
    return [device.path for device in stack.hypervisors[0].plugged.values()]


async def test_a_layer_of_two_containers_is_plugged_once_and_goes_with_the_last(stack: Stack) -> None:
    await pod(stack)
    assert plugged(stack) == []  # the shim answers for the sandbox container, whose image the guest does not need
    for name in ("one", "two"):
        await stack.pod.create(request(stack, name, f"{LAYERS}/{name}", BASE))
        await stack.pod.start(ContainerId(name), None)

    assert plugged(stack) == [f"{LAYERS}/one", BASE, f"{LAYERS}/two"]
    storages = stack.agent.containers["two"].storages
    assert [(each.driver, each.fstype) for each in storages] == [
        ("scsi", "erofs"),
        ("scsi", "erofs"),
        ("overlayfs", "overlay"),
    ]
    assert storages[1] == stack.agent.containers["one"].storages[1]
    assert not [target for target in stack.host.mounts if "/rootfs" in target]

    for name, left in (("one", [BASE, f"{LAYERS}/two"]), ("two", [])):
        await stack.end(ContainerId(name))
        await stack.pod.delete(ContainerId(name), None)
        assert plugged(stack) == left


async def test_a_shared_pid_namespace_brings_the_sandbox_containers_layers_into_the_guest(stack: Stack) -> None:
    sandbox = await pod(stack)

    await stack.pod.create(request(stack, "app", f"{LAYERS}/app", linux=SHARED))

    assert plugged(stack) == [f"{LAYERS}/pause", f"{LAYERS}/app"]
    assert [each.fstype for each in stack.agent.containers["c1"].storages] == ["erofs", "overlay"]
    await stack.end(ContainerId("app"))
    await stack.pod.delete(ContainerId("app"), None)
    await stack.end(sandbox)
    await stack.delete_last(sandbox)
    assert stack.left() == {}


@pytest.mark.parametrize(
    ("size_bytes", "kind", "problem"),
    [(4095, FailedPrecondition, f"plug layer '{BASE}': truncated"), (None, NotFound, f"read '{BASE}'")],
    ids=["truncated", "gone"],
)
async def test_a_bad_layer_is_named_and_nothing_of_its_container_is_left(
    size_bytes: int | None, kind: type[ShimError], problem: str, stack: Stack
) -> None:
    await pod(stack)
    asked = request(stack, "app", f"{LAYERS}/top", BASE)
    if size_bytes is None:
        del stack.host.files[BASE]
    else:
        stack.host.images[BASE] = size_bytes

    with pytest.raises(kind, match=problem):
        await stack.pod.create(asked)

    assert plugged(stack) == []
    assert list(stack.agent.containers) == []


async def test_a_layer_with_a_root_hash_is_verified_by_the_guest(stack: Stack) -> None:
    await pod(stack)
    asked = request(stack, "app", BASE)
    hashes = b"verity\0\0" + bytes(4) + b"\1\0\0\0" + bytes(16) + b"sha256".ljust(32, b"\0")
    stack.host.files[BASE] += hashes.ljust(512, b"\0")
    stack.host.files[f"{BASE}.dmverity"] = b'{"roothash": "ab12", "hashoffset": 4096}'
    layer = replace(asked.rootfs[0], options=("ro", "loop", f"X-containerd.dmverity={BASE}.dmverity"))

    await stack.pod.create(replace(asked, rootfs=(layer, *asked.rootfs[1:])))

    options = list(stack.agent.containers["app"].storages[0].options)
    assert options[:3] == ["ro", "X-kata.dmverity-enabled=true", "X-kata.dmverity.roothash=ab12"]


async def test_a_guest_is_asked_for_all_layers_of_a_container_at_once(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it does not answer, Delete waits once, not once for each layer."""
    await pod(stack)
    await stack.pod.create(request(stack, "app", f"{LAYERS}/top", BASE))
    await stack.pod.start(ContainerId("app"), None)
    vm, asked = stack.hypervisors[0], asyncio.Barrier(2)
    unplug = vm.unplug

    async def unplug_when_all_are_asked_for(device_id: str) -> None:
        await asked.wait()
        await unplug(device_id)

    monkeypatch.setattr(vm, "unplug", unplug_when_all_are_asked_for)
    monkeypatch.setattr(vm_devices, "UNPLUG_WAIT_S", 3600)
    await stack.end(ContainerId("app"))

    async with asyncio.timeout(30):
        await stack.pod.delete(ContainerId("app"), None)

    assert plugged(stack) == []
