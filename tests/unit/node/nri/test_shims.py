"""Shims that ask before they boot, over a real socket; shims that end, and those of an earlier run of the plugin."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from pyshim.host.fds import listening_socket
from pyshim.host.processes.identity import start_ticks
from pyshim.model.errors import FailedPrecondition, NotFound, Unavailable
from pyshim.model.host_facts import Cpu, Machine, Node
from pyshim.model.ids import SandboxId
from pyshim.model.sizing import PLACEMENT_METHOD, PLACEMENT_SERVICE, PlacementRequest, SavedPlacement
from pyshim.node.nri.assignments import Assignments
from pyshim.node.nri.pods import Pods
from pyshim.node.nri.shims import Shims
from pyshim.resources.placement_call import ask_for_placement
from pyshim.state.schema import SandboxState, ShimRecord
from pyshim.state.store import StateStore
from pyshim.ttrpc import Client, RemoteError, connected_unix_socket
from tests.fakes.clock import FastForwardLoop
from tests.unit.state.states import snapshot

_ASK = """\
import asyncio, sys
from pyshim.model.sizing import PlacementRequest
from pyshim.resources.placement_call import ask_for_placement
need = PlacementRequest(sandbox_id="other", name="default/other", vcpus=1, memory_bytes=1 << 30, exclusive=True)
print(asyncio.run(ask_for_placement(sys.argv[1], need)).vcpu_cpus, flush=True)
sys.stdin.read()
"""


def _asking_process(path: Path) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-c", _ASK, str(path)]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _pods(cpus: int = 4) -> Pods:
    machine = Machine(
        cpus=tuple(Cpu(id=each, core=each, l3=0, die=0, socket=0, node=0, online=True) for each in range(cpus)),
        nodes=(Node(id=0, memory_bytes=64 << 30, distances=(10,)),),
    )
    return Pods(Assignments(machine=machine, reserved=(0,)), frozenset({"pykata"}))


def _need(sandbox_id: str = "vm", vcpus: int = 2) -> PlacementRequest:
    return PlacementRequest(
        sandbox_id=sandbox_id, name=f"default/{sandbox_id}", vcpus=vcpus, memory_bytes=1 << 30, exclusive=True
    )


@contextlib.asynccontextmanager
async def _served(pods: Pods, path: Path) -> AsyncIterator[asyncio.Event]:
    """Shims are answered at `path`; the event is set when one has changed something."""
    changed = asyncio.Event()
    shims = Shims(pods, on_change=changed.set)
    serving = asyncio.ensure_future(shims.serve(listening_socket(str(path), backlog=8)))
    try:
        yield changed
    finally:
        serving.cancel()
        await asyncio.wait([serving])
        await shims.close()


async def test_a_shim_gets_the_placement_of_its_vm(tmp_path: Path) -> None:
    pods = _pods()

    async with _served(pods, tmp_path / "nri.sock"):
        placement = await ask_for_placement(str(tmp_path / "nri.sock"), _need())

    assert placement == pods.assignments.placements["vm"]
    assert (placement.vcpu_cpus, placement.service_cpus) == ((1, 2), (0, 3))


async def test_a_placement_ends_with_the_shim_that_asked_for_it(tmp_path: Path) -> None:
    pods = _pods()
    path = tmp_path / "nri.sock"

    async with _served(pods, path) as changed:
        shim = await asyncio.to_thread(_asking_process, path)
        try:
            assert shim.stdout is not None
            assert await asyncio.to_thread(shim.stdout.readline) == b"(1,)\n"
            assert "other" in pods.assignments.placements
            changed.clear()
        finally:
            shim.kill()
        await changed.wait()
        with shim:
            pass
    assert pods.assignments.placements == {}


async def test_a_vm_for_which_there_are_no_cpus_runs_on_shared_ones(tmp_path: Path) -> None:
    async with _served(_pods(), tmp_path / "nri.sock"):
        placement = await ask_for_placement(str(tmp_path / "nri.sock"), _need(vcpus=64))

    assert not placement.exclusive
    assert placement.vcpu_cpus == (0, 1, 2, 3)


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xff", b"[]", b'{"sandbox_id": "vm"}', msgspec.json.encode(_need(vcpus=0))],
    ids=["empty", "no UTF-8", "no object", "incomplete", "no vCPU"],
)
async def test_a_question_that_makes_no_sense_is_refused_and_the_next_is_answered(
    tmp_path: Path, payload: bytes
) -> None:
    path = str(tmp_path / "nri.sock")
    async with _served(_pods(), tmp_path / "nri.sock"):
        async with Client(await connected_unix_socket(path)) as client:
            with pytest.raises(RemoteError):
                await client.call(PLACEMENT_SERVICE, PLACEMENT_METHOD, payload, timeout_s=10)
        assert (await ask_for_placement(path, _need())).exclusive


def test_a_plugin_that_is_not_there_is_named_at_once(tmp_path: Path) -> None:
    path = str(tmp_path / "nri.sock")

    with pytest.raises(NotFound, match=rf"ask '{path}' for a placement: no plugin runs"):
        asyncio.run(ask_for_placement(path, _need()))
    socket_left = listening_socket(path)
    socket_left.close()
    with pytest.raises(Unavailable, match="Connection refused"):
        asyncio.run(ask_for_placement(path, _need()))


def test_a_plugin_that_does_not_answer_delays_a_boot_by_two_seconds(tmp_path: Path) -> None:
    path = str(tmp_path / "nri.sock")

    with (
        listening_socket(path),
        asyncio.Runner(loop_factory=FastForwardLoop) as runner,
        pytest.raises(Unavailable, match="no answer within 2 s"),
    ):
        runner.run(ask_for_placement(path, _need()))


async def test_a_plugin_that_answers_nonsense_is_named(tmp_path: Path) -> None:
    from pyshim.ttrpc import CallContext, ImmediateHandler, Server

    def nonsense(_payload: bytes, _call: CallContext) -> bytes:
        return b"{}"

    path = str(tmp_path / "nri.sock")
    server = Server(services={PLACEMENT_SERVICE: {PLACEMENT_METHOD: ImmediateHandler(nonsense)}})
    serving = asyncio.ensure_future(server.serve(listening_socket(path)))
    await asyncio.sleep(0)
    with pytest.raises(Unavailable, match="vcpu_cpus is missing"):
        await ask_for_placement(path, _need())
    await server.shutdown(grace_s=0)
    await serving


async def test_a_plugin_that_has_no_place_is_quoted(tmp_path: Path) -> None:
    async with _served(_pods(), tmp_path / "nri.sock"):
        with pytest.raises(FailedPrecondition, match="are no VM"):
            await ask_for_placement(str(tmp_path / "nri.sock"), _need(vcpus=0))


def _saved(store: StateStore, sandbox_id: str, *, pid: int, cgroups: dict[str, object]) -> None:
    shim = ShimRecord(pid=pid, start_ticks=start_ticks(pid) or 1, socket="unix:///x", namespace="default")
    taken = msgspec.structs.replace(snapshot(), cgroups=cgroups)
    store.enter(sandbox_id, shim)
    store.save(SandboxState(sandbox_id=SandboxId(sandbox_id), shim=shim, snapshot=taken, ledger=()))


async def test_placements_of_living_shims_are_found_again_and_broken_ones_are_not(tmp_path: Path) -> None:
    first = _pods()
    placement = first.place_for_shim(_need())
    placed = msgspec.to_builtins(SavedPlacement(request=_need(), placement=placement))
    store = StateStore(root=str(tmp_path / "sbs"), register=str(tmp_path / "register"))
    _saved(store, "vm", pid=os.getpid(), cgroups={"Placed": placed})
    _saved(store, "unplaced", pid=os.getpid(), cgroups={})
    _saved(store, "broken", pid=os.getpid(), cgroups={"Placed": {"need": 1}})
    _saved(store, "dead", pid=2**22 + 1, cgroups={"Placed": placed})
    (tmp_path / "register" / "damaged").write_text("{}")
    pods = _pods()

    shims = Shims(pods, on_change=lambda: None)
    shims.find(store)
    await shims.close()

    assert dict(pods.assignments.placements) == {"vm": placement}
