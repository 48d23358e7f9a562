"""Shims that are forked by the node's zygote: the same as executed ones, but for what they cost."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path

import pytest

from .conftest import session_zygote
from .framework import oci, processes, zygote
from .framework.ctr import Ctr
from .framework.direct import direct_shim
from .framework.images import IMAGE
from .framework.processes import Process
from .framework.runtime import Runtime
from .framework.waiting import eventually
from .framework.zygote import Zygote

pytestmark = pytest.mark.vm
_IDLE_S = 8.0
_IDLE_KIB = 8 << 10
_LIKELY_KIB = 5 << 10
_SETTLED_AFTER_S = 1.0
"""What goes on when memory has just been given back makes a megabyte of it the shim's own again."""
_EXECS = 100
_NOISE_KIB = 384
"""Idle shims differ by up to 250, whatever they have served; 50 processes that were kept made 490 and more."""
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


def test_an_idle_shim_keeps_neither_what_it_only_looked_at_nor_what_it_has_served(
    ctr: Ctr, runtime: Runtime, shared: str, name: str
) -> None:
    """What it keeps is a pod's state: one that has served much has no more than one that has served nothing.

    Of two shims, since each rests at most once a minute. And in one test: after it each is asked, and makes some of
    that memory its own again.
    """
    (idle,) = runtime.shims(shared)
    idle_kib = _rested_kib(idle.pid, _IDLE_KIB)
    ctr("run", "--detach", "--runtime", runtime.name, IMAGE, name, "sleep", "1000")
    for number in range(_EXECS):
        ctr("task", "exec", "--exec-id", f"e{number}", name, "true")
    (served,) = runtime.shims(name)

    _rested_kib(served.pid, idle_kib + _NOISE_KIB)


def test_the_fork_that_waits_has_its_own_already_what_a_pod_will_write_to(
    node_zygote: Zygote, runtime: Runtime
) -> None:
    def own_kib() -> int:
        shims = {process.pid for process in processes.find("containerd-shim-pykata-v2")}
        return max((_own_kib(pid) for pid in node_zygote.waiting(shims)), default=0)

    eventually(lambda: own_kib() > _LIKELY_KIB, what=lambda: f"the fork that waits has more than {own_kib()} KiB")


def _rested_kib(pid: int, most_kib: int) -> int:
    """The size of a shim's own memory, which is at most `most_kib` once the shim has had a rest."""

    def look() -> int:
        if _own_kib(pid) > most_kib:
            return 0
        time.sleep(_SETTLED_AFTER_S)
        own_kib = _own_kib(pid)
        return own_kib if own_kib <= most_kib else 0

    return eventually(look, what=lambda: f"of {_own_kib(pid)} KiB of its own the shim keeps at most {most_kib}")


def _own_kib(pid: int) -> int:
    """What it has written to of the memory that it began with, and what is new.

    Not what only it looks at just then. Source: proc(5), /proc/PID/smaps, Anonymous.
    """
    (line,) = re.findall(r"(?m)^Anonymous:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text())
    return int(line)


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


@pytest.mark.executed("the zygote has ended")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["stopped", "killed"])
def test_a_pod_survives_the_end_of_the_zygote_and_the_next_one_needs_none(
    node_zygote: Zygote, ctr: Ctr, runtime: Runtime, name: str, shared: str, number: signal.Signals
) -> None:
    """An upgrade replaces the zygote; it must not touch running pods. Nor must its death, which leaves its socket."""
    (forked,) = runtime.shims(shared)
    assert forked.never_executed
    node_zygote.stop(number)

    eventually(lambda: not processes.find("-idle", "zygote"), what="the fork that waited is gone")
    assert ctr("task", "exec", "--exec-id", "still", shared, "echo", "here").out == "here\n"
    eventually(lambda: forked.pid in {p.pid for p in processes.running() if p.parent == 1}, what="init has the shim")
    ctr("run", "--detach", "--runtime", runtime.name, IMAGE, name, "sleep", "1000")
    (executed,) = runtime.shims(name)
    assert executed.command[3] == forked.command[3]
    assert not executed.never_executed

    node_zygote.start()


@pytest.mark.executed("there is no zygote yet")
def test_the_first_start_leaves_a_zygote_where_containerd_asks_for_one(
    node_zygote: Zygote, runtime: Runtime, name: str, scratch: Path
) -> None:
    node_zygote.close()
    with contextlib.ExitStack() as stack:

        def started(container: str) -> Process:
            config = oci.spec("true", name=container, rootfs=scratch)
            shim = stack.enter_context(direct_shim(runtime, BINARIES, container, scratch / container, config))
            shim.environment["PYSHIM_ZYGOTE"] = "auto"
            shim.start()
            return eventually(lambda: runtime.shims(container), what=f"a shim serves {container!r}")[0]

        try:
            executed = started(f"{name}-first")
            launched, _ = eventually(_zygote_and_its_fork, what="a zygote is there and a fork of it waits")
            forked = started(f"{name}-second")
        finally:
            for process in processes.find("-idle", "zygote"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGTERM)
        assert not executed.never_executed
        assert forked.never_executed
        assert forked.parent == launched.pid
        eventually(lambda: not processes.find("-idle", "zygote"), what="the zygote and its fork are gone")
        assert [shim.pid for shim in runtime.shims(f"{name}-second")] == [forked.pid]
        assert not [path for path in zygote.DIRECTORY.iterdir() if path.is_socket()]

    node_zygote.start()


def _zygote_and_its_fork() -> list[Process]:
    """The zygote that a `start` has launched, and the fork of it that waits; nothing unless both are there."""
    found = processes.find("-idle", "zygote")
    return found if len(found) == 2 and found[1].parent == found[0].pid else []
