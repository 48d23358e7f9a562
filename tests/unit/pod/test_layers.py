"""Containers whose image is layers on disks: plugged once for a pod, before the guest hears of the container."""

import asyncio
import struct

import pytest
from msgspec.structs import replace

from pyshim.model.errors import FailedPrecondition, NotFound, ShimError
from pyshim.model.ids import ContainerId
from pyshim.model.task import CreateTask, RootfsMount
from pyshim.resources.devices import plugged as plugged_devices
from tests.unit.pod.conftest import BUNDLES, MEMBER, SANDBOX, Stack

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
    assert plugged(stack) == []  # the shim plays the sandbox container, whose image the guest does not need
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


async def test_layers_that_were_plugged_leave_with_a_create_that_fails(stack: Stack) -> None:
    await pod(stack)
    stack.host.faults.plan({"plug": 2})

    with pytest.raises(ShimError):
        await stack.pod.create(request(stack, "app", f"{LAYERS}/top", BASE))

    assert plugged(stack) == []


async def test_a_guest_is_asked_for_all_layers_of_a_container_at_once(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that does not answer costs a Delete one wait, not one for each layer."""
    await pod(stack)
    await stack.pod.create(request(stack, "app", f"{LAYERS}/top", BASE))
    await stack.pod.start(ContainerId("app"), None)
    vm, asked = stack.hypervisors[0], asyncio.Barrier(2)
    unplug = vm.unplug

    async def unplug_when_all_are_asked_for(device_id: str) -> None:
        await asked.wait()
        await unplug(device_id)

    monkeypatch.setattr(vm, "unplug", unplug_when_all_are_asked_for)
    monkeypatch.setattr(plugged_devices, "UNPLUG_WAIT_S", 3600)
    await stack.end(ContainerId("app"))

    async with asyncio.timeout(30):
        await stack.pod.delete(ContainerId("app"), None)

    assert plugged(stack) == []
