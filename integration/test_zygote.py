"""Shims that are forked by the node's zygote: the same as executed ones, but for what they cost."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from .conftest import session_zygote
from .framework import oci, processes, zygote
from .framework.ctr import Ctr
from .framework.direct import direct_shim
from .framework.processes import Process
from .framework.runtime import Runtime
from .framework.waiting import eventually
from .framework.zygote import Zygote

pytestmark = pytest.mark.vm
_IDLE_S = 8.0
BINARIES = Path(__file__).resolve().parents[1] / "bin"


@pytest.fixture
def node_zygote() -> Zygote:
    """It runs: this file's shims are forked in every run."""
    return session_zygote


def test_a_shim_is_the_zygotes_child_and_looks_like_an_executed_one(
    node_zygote: Zygote, runtime: Runtime, shared: str
) -> None:
    (shim,) = runtime.shims(shared)

    assert shim.parent == node_zygote.pid
    assert shim.command[3].endswith(runtime.binary)
    assert shim.command[-1] == "serve"
    assert os.readlink(f"/proc/{shim.pid}/cwd").endswith(f"/{shared}")
    assert os.getsid(shim.pid) == shim.pid
    assert shim.never_executed


def test_an_idle_shim_is_not_woken(runtime: Runtime, shared: str) -> None:
    """No timer polls: in some stretch of seconds nothing at all wakes it. What a call before left over may."""
    (shim,) = runtime.shims(shared)
    woken: list[int] = []

    def sleeps() -> bool:
        before = _switches(shim.pid)
        time.sleep(_IDLE_S)
        woken.append(_switches(shim.pid) - before)
        return woken[-1] == 0

    eventually(sleeps, what=lambda: f"nothing wakes the shim for {_IDLE_S} s; it was woken {woken} times")


def _switches(pid: int) -> int:
    """The number of times that the process's threads have gone to sleep."""
    lines: list[str] = []
    for path in Path(f"/proc/{pid}/task").glob("*/status"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
            lines += path.read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches:"))


@pytest.mark.executed("the zygote has ended")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["stopped", "killed"])
def test_a_pod_survives_the_end_of_the_zygote_and_the_next_one_needs_none(
    node_zygote: Zygote, ctr: Ctr, runtime: Runtime, name: str, shared: str, number: signal.Signals
) -> None:
    """An upgrade replaces the zygote; it must not touch running pods. Nor must its death, which leaves its socket."""
    (forked,) = runtime.shims(shared)
    assert forked.never_executed
    node_zygote.stop(number)

    assert ctr.inside(shared, "echo", "here").out == "here\n"
    eventually(lambda: forked.pid in {p.pid for p in processes.running() if p.parent == 1}, what="init has the shim")
    ctr.start(name)
    (executed,) = runtime.shims(name)
    assert executed.command[3] == forked.command[3]
    assert not executed.never_executed

    node_zygote.start()


@pytest.mark.executed("there is no zygote yet")
def test_the_first_start_leaves_a_zygote_from_which_the_next_one_has_its_shim(
    node_zygote: Zygote, runtime: Runtime, name: str, scratch: Path
) -> None:
    node_zygote.stop()
    with zygote.left_behind(), contextlib.ExitStack() as stack:

        def started(container: str) -> Process:
            config = oci.spec("true", name=container, rootfs=scratch)
            shim = stack.enter_context(direct_shim(runtime, BINARIES, container, scratch / container, config))
            shim.start()
            return eventually(lambda: runtime.shims(container), what=f"a shim serves {container!r}")[0]

        executed = started(f"{name}-first")
        eventually(listening, what="a zygote listens")
        (left,) = zygote.launched()
        forked = started(f"{name}-second")
        os.kill(left.pid, signal.SIGTERM)
        eventually(lambda: not zygote.launched(), what="the zygote has ended")

        assert not executed.never_executed
        assert "no zygote listens at" in " ".join(executed.command)
        assert forked.never_executed
        assert forked.parent == left.pid
        assert [shim.pid for shim in runtime.shims(f"{name}-second")] == [forked.pid]
        assert not listening()

    node_zygote.start()


def listening() -> bool:
    return any(path.is_socket() for path in zygote.DIRECTORY.iterdir())
