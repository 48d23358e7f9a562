"""The file alone says what a later daemon must know: a model rebuilt from it answers as the living pod does."""

import asyncio
import shutil
import tempfile
from collections.abc import Coroutine
from typing import Any

import pytest

from pyshim.model.errors import NotFound
from pyshim.model.ids import ContainerId, ExecId, SandboxId
from pyshim.model.seams import Records
from pyshim.model.task import Status
from pyshim.pod.snapshot import EXECS_WRITTEN_AFTER_S
from pyshim.resources.sizing.plan.record import SizingRecord
from pyshim.state.records import SandboxRecords
from pyshim.state.schema import SandboxState, ShimRecord
from pyshim.state.store import StateStore
from tests.unit.pod.conftest import PIPES, Stack, scenario, until
from tests.unit.pod.recovered import Recovered, Reopened

SHIM = ShimRecord(pid=1, start_ticks=2, socket="unix:///run/containerd/s/abc", namespace="default")
VOLUME = {"destination": "/data", "type": "bind", "source": "/srv/data", "options": ["rbind", "ro"]}


class CountingStore(StateStore):
    def __init__(self, root: str) -> None:
        super().__init__(root=root)
        self.writes = 0

    def save(self, state: SandboxState) -> None:
        self.writes += 1
        super().save(state)


class OnDisk:
    """A stack whose records are real files."""

    def __init__(self, stack: Stack) -> None:
        self._root = tempfile.mkdtemp()
        self.store = CountingStore(f"{self._root}/sbs")
        self._stack = stack
        self.records: SandboxRecords | None = None
        stack.open_records = self._open

    async def _open(self, sandbox_id: str) -> Records:
        self.records = SandboxRecords(
            store=self.store, sandbox_id=SandboxId(sandbox_id), shim=SHIM, release=self._stack.host.release
        )
        return self.records

    async def read(self) -> Recovered:
        """What execs have changed is written by now, too."""
        await asyncio.sleep(2 * EXECS_WRITTEN_AFTER_S)
        return Recovered(self.store.load("c1"))

    def close(self) -> None:
        assert self.store.sandbox_ids() == ()
        shutil.rmtree(self._root)


async def assert_same_answers(stack: Stack, found: Recovered, *processes: tuple[str, str | None]) -> None:
    for name, exec_name in processes:
        container, exec_id = ContainerId(name), ExecId(exec_name) if exec_name else None
        assert found.process_state(container, exec_id) == stack.pod.state(container, exec_id)
        assert found.processes(container) == stack.pod.pids(container)
        assert found.snapshot.vmm_pid == stack.pod.connect(container)


def test_a_model_rebuilt_from_the_file_answers_as_the_living_pod_does(pod_annotations: Any) -> None:
    @scenario
    async def body(stack: Stack) -> None:
        disk = OnDisk(stack)
        await stack.run("c1", ["sleep"], annotations=pod_annotations["sandbox"])
        app = await stack.run("app", ["cat"], PIPES, annotations=pod_annotations["container"], mounts=[VOLUME])
        running = await stack.exec(app, "running", ["sleep"])
        await stack.pod.start(app, running)
        ended = await stack.exec(app, "ended", ["exit", "7"])
        await stack.pod.start(app, ended)
        await stack.pod.wait(app, ended)
        await stack.exec(app, "waiting", ["never", "started"], PIPES)
        everybody = [("c1", None), ("app", None), ("app", "running"), ("app", "ended"), ("app", "waiting")]

        found = await disk.read()

        await assert_same_answers(stack, found, *everybody)
        assert found.process_state(app, ended).exit is not None
        waiting = found.container(app).execs[2]
        assert (waiting.status, waiting.spec["args"]) == (Status.CREATED, ["never", "started"])
        assert disk.records is not None
        assert found.state.ledger == disk.records.ledger.entries()
        assert found.snapshot.owner == "c1"
        assert SizingRecord.from_json(found.snapshot.sizing, "state").as_json() == found.snapshot.sizing
        assert [mount["Destination"] for mount in found.container(app).mounts] == ["/data"]
        vm = stack.hypervisors[0]
        assert found.snapshot.hypervisor["Pid"] == vm.pid
        assert set(found.reopened()) == {
            Reopened("pidfd", f"{vm.pid}/1"),
            Reopened("listen", SHIM.socket),
            Reopened("qmp", str(vm.saved().get("APISocket", ""))),
            Reopened("agent", str(vm.agent_address)),
            *(Reopened(name, path) for name, path in (("stdin", "/in"), ("stdout", "/out"), ("stderr", "/err"))),
        }
        with pytest.raises(NotFound, match="no-such"):
            found.container(ContainerId("no-such"))

        await stack.pod.pause(app)
        await assert_same_answers(stack, await disk.read(), *everybody)
        await stack.pod.resume(app)
        await stack.pod.delete(app, ended)
        await assert_same_answers(stack, await disk.read(), *(one for one in everybody if one[1] != "ended"))
        await stack.pod.close()
        disk.close()

    body()


@scenario
async def test_what_its_reader_has_of_each_stream_is_on_disk(stack: Stack) -> None:
    disk = OnDisk(stack)
    container = await stack.run("c1", ["cat"], PIPES)
    stdin = stack.host.streams["c1"].stdin
    assert stdin is not None
    stdin.chunks.put_nowait(b"12345")
    stdin.close_io()

    await stack.pod.wait(container, None)
    stdout = stack.host.streams["c1"].stdout
    assert stdout is not None

    moved = (await disk.read()).moved(container, None)
    assert (moved.stdin, moved.stdout) == (5, len(stdout.data))
    await until(lambda: stack.hypervisors[0].is_running is False)
    await stack.pod.delete(container, None)
    disk.close()


def test_a_sandbox_without_a_vm_has_nothing_to_take_over() -> None:
    state = SandboxState(sandbox_id=SandboxId("c1"), shim=SHIM, snapshot=None, ledger=())

    with pytest.raises(NotFound, match="no vm yet"):
        Recovered(state).reopened()


async def ended_and_deleted(stack: Stack, container_id: ContainerId) -> None:
    await stack.pod.wait(container_id, None)
    await stack.pod.delete(container_id, None)


@pytest.mark.parametrize("volumes", [0, 1, 20])
def test_a_call_writes_once_per_host_resource_and_at_most_twice_more(pod_annotations: Any, volumes: int) -> None:
    mounts = [{**VOLUME, "destination": f"/data{number}"} for number in range(volumes)]

    @scenario
    async def body(stack: Stack) -> None:
        disk = OnDisk(stack)
        await stack.run("c1", ["sleep"], annotations=pod_annotations["sandbox"])

        async def counted(call: Coroutine[Any, Any, object]) -> tuple[int, int]:
            """Writes, and how many entries the ledger has more or less."""
            assert disk.records is not None
            before, held = disk.store.writes, len(disk.records.ledger.entries())
            await call
            return disk.store.writes - before, abs(len(disk.records.ledger.entries()) - held)

        request = stack.request("app", ["exit", "0"], PIPES, annotations=pod_annotations["container"], mounts=mounts)
        writes, made = await counted(stack.pod.create(request))
        assert made >= 2 * volumes
        assert writes <= made + 2
        app = request.container_id

        async def ask() -> None:
            stack.pod.state(app, None), stack.pod.pids(app), stack.pod.connect(app)
            await stack.pod.stats(app)

        assert await counted(ask()) == (0, 0)
        assert (await counted(stack.pod.start(app, None)))[0] <= 2
        writes, gone = await counted(ended_and_deleted(stack, app))
        assert gone == made
        assert writes <= gone + 4  # two calls: the exit, and Delete
        await stack.pod.close()
        disk.close()

    body()
