"""Shims that are forked by the node's zygote: the same as executed ones, but for what they cost."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from . import test_run as in_the_other_mode
from .conftest import session_zygote
from .framework import processes, zygote
from .framework.ctr import Ctr
from .framework.images import IMAGE
from .framework.runtime import Runtime
from .framework.waiting import eventually
from .framework.zygote import Zygote

pytestmark = pytest.mark.vm
_IDLE_S = 8.0

# The tests of that file run a second time, here with forked shims.
for _name, _test in tuple(vars(in_the_other_mode).items()):
    if _name.startswith("test_"):
        globals()[_name] = _test


@pytest.fixture(scope="module", autouse=True)
def node_zygote(module_leaves_nothing: None) -> Iterator[Zygote]:
    if zygote.wanted():
        yield session_zygote
        return
    session_zygote.start()
    yield session_zygote
    session_zygote.close()


def test_a_shim_is_the_zygotes_child_and_looks_like_an_executed_one(
    node_zygote: Zygote, runtime: Runtime, shared: str
) -> None:
    (shim,) = runtime.shims(shared)

    assert shim.parent == node_zygote.pid
    assert shim.command[3].endswith(runtime.binary)
    assert shim.command[-1] == "serve"
    assert os.readlink(f"/proc/{shim.pid}/cwd").endswith(f"/{shared}")
    assert os.getsid(shim.pid) == shim.pid


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
    """How often the process's threads have gone to sleep."""
    lines: list[str] = []
    for path in Path(f"/proc/{pid}/task").glob("*/status"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
            lines += path.read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches:"))


def test_a_pod_survives_the_end_of_the_zygote_and_the_next_one_needs_none(
    node_zygote: Zygote, ctr: Ctr, runtime: Runtime, name: str, shared: str
) -> None:
    """An upgrade replaces the zygote; it must not touch running pods."""
    (forked,) = runtime.shims(shared)
    assert forked.parent == node_zygote.pid
    node_zygote.stop()

    assert ctr("task", "exec", "--exec-id", "still", shared, "echo", "here").out == "here\n"
    eventually(lambda: forked.pid in {p.pid for p in processes.running() if p.parent == 1}, what="init has the shim")
    ctr("run", "--detach", "--runtime", runtime.name, IMAGE, name, "sleep", "1000")
    (executed,) = runtime.shims(name)
    assert executed.command[3] == forked.command[3]

    node_zygote.start()
