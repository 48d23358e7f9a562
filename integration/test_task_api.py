"""The Task API asked directly over ttrpc: order, repetition, latched exits, and root file systems `ctr` cannot give."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from ipaddress import ip_interface
from pathlib import Path
from typing import Any

import pytest

from protos.containerd import task_v2_pb2, types_pb2
from pyshim.ttrpc import Code, RemoteError

from .framework import images, oci
from .framework.direct import DirectShim, code_of, direct_shim, wait_until_gone
from .framework.loop_devices import loop_device
from .framework.runtime import Runtime
from .framework.waiting import eventually

CREATED, RUNNING, STOPPED = 1, 2, 3
_BINARIES = Path(__file__).resolve().parents[1] / "bin"

Shims = Callable[..., DirectShim]


@pytest.fixture
def shim_for(runtime: Runtime, containerd: object, name: str, scratch: Path, plain_rootfs: Path) -> Iterator[Shims]:
    """A started shim for a command: `shim_for("sleep", "10")`."""
    with contextlib.ExitStack() as stack:

        def make(*args: str, rootfs: Path | str = plain_rootfs) -> DirectShim:
            config = oci.spec(*args, name=name, rootfs=rootfs)
            shim = stack.enter_context(direct_shim(runtime, _BINARIES, name, scratch / "bundle", config))
            shim.start()
            return shim

        yield make


def _code(shim: DirectShim, method: str, **fields: Any) -> int:
    with pytest.raises(RemoteError) as refused:
        shim.call(method, **fields)
    return code_of(refused.value)


def _state(shim: DirectShim) -> task_v2_pb2.StateResponse:
    state: task_v2_pb2.StateResponse = shim.call("State", task_v2_pb2.StateResponse)
    return state


def test_life_of_a_task_from_create_to_delete(shim_for: Shims) -> None:
    shim = shim_for("sh", "-c", "exit 12")

    created = shim.call("Create", task_v2_pb2.CreateTaskResponse, bundle=str(shim.bundle))
    assert created.pid > 1
    assert (_state(shim).status, _state(shim).pid) == (CREATED, created.pid)
    started = shim.call("Start", task_v2_pb2.StartResponse)
    assert started.pid == created.pid
    ended = shim.call("Wait", task_v2_pb2.WaitResponse)
    assert ended.exit_status == 12
    assert ended.exited_at.seconds > 0
    assert (_state(shim).status, _state(shim).exit_status) == (STOPPED, 12)
    deleted = shim.call("Delete", task_v2_pb2.DeleteResponse)
    assert (deleted.exit_status, deleted.pid) == (12, created.pid)
    assert deleted.exited_at == ended.exited_at
    assert _code(shim, "State") == Code.NOT_FOUND
    shim.call("Shutdown")
    wait_until_gone(shim)
    assert not os.path.exists(shim.socket_path)


@pytest.mark.vm
def test_state_answers_while_the_vm_boots(shim_for: Shims) -> None:
    """containerd gives State two seconds, and a boot takes longer."""
    shim = shim_for("sleep", "1000")
    order: list[str] = []

    async def create() -> object:
        try:
            return await shim.ask("Create", task_v2_pb2.CreateTaskResponse, bundle=str(shim.bundle))
        finally:
            order.append("created")

    async def ask_meanwhile() -> None:
        while not (shim.runtime.vmms(shim.container) or order):  # noqa: ASYNC110 - /proc has no event for us
            await asyncio.sleep(0.01)
        with contextlib.suppress(RemoteError):
            await shim.ask("State", task_v2_pb2.StateResponse)
        order.append("answered")

    created, asked = shim.together(create, ask_meanwhile)

    assert not isinstance(created, BaseException), created
    assert not isinstance(asked, BaseException), asked
    assert order == ["answered", "created"]


@pytest.mark.vm
def test_interfaces_put_into_the_tasks_namespace_after_create_are_there_for_the_first_command(
    shim_for: Shims, scratch: Path
) -> None:
    """As Docker and `ctr run --cni` do it. The spec's network namespace has no path, and is named for its sandbox."""
    shim = shim_for("sh", "-c", "ip addr; ip route; ip -6 route")
    created = shim.call(
        "Create", task_v2_pb2.CreateTaskResponse, bundle=str(shim.bundle), stdout=f"file://{scratch}/out"
    )
    named = Path(f"/run/netns/pyshim-{shim.container}")
    assert named.stat().st_ino == Path(f"/proc/{created.pid}/ns/net").stat().st_ino

    for number, name in enumerate(("eth0", "eth1")):
        made = f"ip link add itlate{number} type veth peer name {name} netns {created.pid}"
        subprocess.run(made.split(), check=True)
        for words in (
            f"addr add 10.98.{number}.2/24 dev {name}",
            f"addr add fd00:98:{number}::2/64 dev {name} nodad",
            f"link set {name} up",
        ):
            subprocess.run(["ip", "-n", named.name, *words.split()], check=True)
    for words in ("route add default via 10.98.0.1", "-6 route add default via fd00:98:1::1"):
        subprocess.run(["ip", "-n", named.name, *words.split()], check=True)
    shim.call("Start")
    shim.call("Wait")
    shim.call("Delete")

    shown = (scratch / "out").read_text()
    for expected in ("10.98.0.2/24", "10.98.1.2/24", "fd00:98:0::2/64", "fd00:98:1::2/64"):
        assert str(ip_interface(expected)) in shown
    assert "default via 10.98.0.1 dev eth0" in shown
    assert "default via fd00:98:1::1 dev eth1" in shown
    assert not named.exists()


@pytest.mark.vm
def test_input_closed_before_start_is_end_of_input(shim_for: Shims, scratch: Path) -> None:
    stdin, stdout = scratch / "stdin", scratch / "stdout"
    os.mkfifo(stdin)
    shim = shim_for("sh", "-c", "wc -c; exit 3")
    writer = os.open(stdin, os.O_RDWR)
    shim.call("Create", bundle=str(shim.bundle), stdin=str(stdin), stdout=f"file://{stdout}")
    os.write(writer, b"four")
    os.close(writer)
    shim.call("CloseIO", stdin=True)

    shim.call("Start")

    assert shim.call("Wait", task_v2_pb2.WaitResponse, within_s=30).exit_status == 3
    assert stdout.read_text().strip() == "4"


@pytest.mark.vm  # the reference shim waits for a reader for ever
def test_an_unopened_fifo_does_not_keep_a_task_from_running_and_ending(shim_for: Shims, scratch: Path) -> None:
    paths = {stream: scratch / stream for stream in ("stdout", "stderr")}
    for path in paths.values():
        os.mkfifo(path)
    shim = shim_for("sh", "-c", "echo nobody reads this; exit 8")

    shim.call("Create", bundle=str(shim.bundle), stdout=str(paths["stdout"]), stderr=str(paths["stderr"]))
    shim.call("Start", within_s=10)

    assert shim.call("Wait", task_v2_pb2.WaitResponse, within_s=30).exit_status == 8
    shim.call("Delete", within_s=15)


@pytest.fixture
def block_device(scratch: Path) -> Iterator[Path]:
    """A loop device with an ext4 file system that holds the payload."""
    content = images.unpack_rootfs(scratch / "content")
    image = scratch / "disk.ext4"
    with image.open("wb") as file:
        file.truncate(48 * 1024 * 1024)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-d", content, image], check=True, capture_output=True)
    with loop_device(image) as device:
        yield Path(device)


def test_root_on_a_block_device_is_read_and_written(shim_for: Shims, scratch: Path, block_device: Path) -> None:
    stdout = scratch / "out"
    shim = shim_for(
        "sh", "-c", "cat /layer-marker; echo kept > /written; sync; grep ' / ' /proc/mounts", rootfs="rootfs"
    )
    mount = types_pb2.Mount(type="ext4", source=str(block_device), options=["rw"])

    shim.call("Create", bundle=str(shim.bundle), rootfs=[mount], stdout=f"file://{stdout}", stderr=f"file://{stdout}")
    shim.call("Start")
    status = shim.call("Wait", task_v2_pb2.WaitResponse).exit_status
    shim.call("Delete")

    assert status == 0, stdout.read_text()
    assert stdout.read_text().splitlines()[0] == "upper"
    again = scratch / "again"
    again.mkdir()
    subprocess.run(["mount", "-o", "ro", block_device, again], check=True)
    try:
        assert (again / "written").read_text() == "kept\n"
    finally:
        subprocess.run(["umount", again], check=True)


def test_root_of_bind_mount_is_unmounted_by_delete(shim_for: Shims, scratch: Path) -> None:
    content = images.unpack_rootfs(scratch / "content")
    shim = shim_for("sh", "-c", "echo kept > /written", rootfs="rootfs")
    mount = types_pb2.Mount(type="bind", source=str(content), options=["rbind", "rw"])

    shim.call("Create", bundle=str(shim.bundle), rootfs=[mount])
    shim.call("Start")
    shim.call("Wait")
    shim.call("Delete")

    assert (content / "written").read_text() == "kept\n"
    eventually(lambda: not os.path.ismount(shim.bundle / "rootfs"), what="the bundle's rootfs is unmounted")
    (shim.bundle / "rootfs").rmdir()
