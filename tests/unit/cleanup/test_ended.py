"""What CRI-O asks the socket of a sandbox whose shim died, by a real connection to a process of its own."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from protos.containerd import task_v2_pb2 as pb
from pyshim.cleanup import ended
from pyshim.model.ids import HostPath
from pyshim.model.sandbox import ContainerSnapshot
from pyshim.model.task import ExitStatus
from pyshim.state.schema import SandboxState
from pyshim.task.service import SERVICES
from pyshim.ttrpc import Client, Code, RemoteError
from pyshim.ttrpc.client import connected_unix_socket
from tests.unit.state import states

STOPPED = 3
"""Of containerd.v1.types.Status."""
CRIO = {"io.kubernetes.cri-o.ContainerType": "container", "io.kubernetes.cri-o.SandboxID": "sb1"}


def container(root: Path, name: str, exit_status: int | None = None) -> ContainerSnapshot:
    bundle = root / name
    bundle.mkdir()
    end = None if exit_status is None else ExitStatus(status=exit_status, exited_at_ns=1_000_000_000)
    return replace(states.container(name, end), bundle=HostPath(str(bundle)), annotations=CRIO)


def state(root: Path, *containers: ContainerSnapshot) -> SandboxState:
    found = states.state(*containers)
    return replace(found, shim=replace(found.shim, socket=f"unix://{root}/s"))


@pytest.fixture
def answering(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[SandboxState], int]]:
    """`answer_crio`, whose processes end with the test."""
    monkeypatch.setattr(ended, "_LOOK_S", 0.05)
    pids: list[int] = []
    exits = f"{tmp_path}/exits"

    def answer(found: SandboxState) -> int:
        if pid := ended.answer_crio(found, exits):
            pids.append(pid)
        return pid

    yield answer
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def asked(root: Path, use: Callable[[Client], Awaitable[None]]) -> None:
    async def connect_and_use() -> None:
        client = Client(await connected_unix_socket(f"{root}/s"))
        try:
            await use(client)
        finally:
            client.close()

    asyncio.run(connect_and_use())


async def call(client: Client, method: str, name: str) -> bytes:
    return await client.call(SERVICES[0], method, pb.StateRequest(id=name).SerializeToString(), timeout_s=30)


def test_crio_stops_and_removes_the_containers_of_a_dead_shim(
    tmp_path: Path, answering: Callable[[SandboxState], int]
) -> None:
    left = state(tmp_path, container(tmp_path, "sb1"), container(tmp_path, "app", exit_status=3))

    async def as_crio(client: Client) -> None:
        status = pb.StateResponse.FromString(await call(client, "State", "sb1"))
        assert (status.status, status.exit_status, status.stdout) == (STOPPED, ended.EXIT_LOST, "/fifo/out")
        assert pb.WaitResponse.FromString(await call(client, "Wait", "app")).exit_status == 3
        for name in ("app", "begun-after-the-last-save", "sb1"):
            await call(client, "Kill", name)
            await call(client, "Delete", name)
            await call(client, "Shutdown", name)
        with pytest.raises(RemoteError) as unknown:
            await call(client, "State", "app")
        assert unknown.value.code is Code.NOT_FOUND
        with pytest.raises(RemoteError) as refused:
            await call(client, "Start", "app")
        assert refused.value.code is Code.UNIMPLEMENTED

    (tmp_path / "exits").mkdir()
    pid = answering(left)
    assert sorted(os.listdir(tmp_path / "exits")) == ["app", "sb1"]
    asked(tmp_path, as_crio)
    for name in ("app", "sb1"):
        (tmp_path / name).rmdir()

    assert os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert not Path(f"{tmp_path}/s").exists()


def test_no_process_is_made_for_a_pod_of_containerd_or_one_that_is_removed_or_served(
    tmp_path: Path, answering: Callable[[SandboxState], int]
) -> None:
    found = container(tmp_path, "sb1")
    of_containerd = replace(found, annotations={"io.kubernetes.cri.container-type": "sandbox"})
    removed = replace(found, bundle=HostPath(f"{tmp_path}/removed"))

    assert answering(state(tmp_path, of_containerd, removed)) == 0
    assert answering(replace(state(tmp_path), snapshot=None)) == 0
    assert answering(state(tmp_path, found)) != 0
    assert answering(state(tmp_path, found)) == 0
