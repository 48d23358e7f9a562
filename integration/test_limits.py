"""A shim at a real limit of its host: calls are answered by declared errors, and what was made is undone within it.

A slow disk is no limit: it costs time.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.stub_pods import options
from pyshim.resources.cgroups.host.hierarchies import place_of
from pyshim.ttrpc import RemoteError

from .framework import cgroups, stubs, system_calls
from .framework.faulty_pod import FaultyPod, faulty_pod
from .framework.runtime import Runtime

pytestmark = pytest.mark.vm


@contextlib.contextmanager
def processes(pid: int, more: int) -> Iterator[None]:
    """Within the block the process may have so many more of them, or of threads."""
    root = cgroups.hierarchy("pids")
    origin = root / place_of(pid, () if cgroups.is_v2() else ("pids",)).lstrip("/")
    cgroup = root / f"limited-{pid}"
    cgroup.mkdir()
    try:
        (cgroup / "cgroup.procs").write_text(str(pid))
        (cgroup / "pids.max").write_text(str(int((cgroup / "pids.current").read_text()) + more))
        yield
    finally:
        for line in (cgroup / "cgroup.procs").read_text().split():
            (origin / "cgroup.procs").write_text(line)
        cgroup.rmdir()


@contextlib.contextmanager
def descriptors(pid: int, more: int) -> Iterator[None]:
    highest = max(map(int, os.listdir(f"/proc/{pid}/fd")))
    _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (highest + 1 + more, hard))
    yield


@contextlib.contextmanager
def memory(pid: int, more: int) -> Iterator[None]:
    """MiB of address space."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    resource.prlimit(pid, resource.RLIMIT_AS, (pages * resource.getpagesize() + (more << 20), resource.RLIM_INFINITY))
    yield


CASES = {
    **{f"{more} processes": (processes, more, "pids.max|EAGAIN") for more in (0, 1)},
    **{f"{more} descriptors": (descriptors, more, "EMFILE|oo many open files") for more in (0, 1, 2, 4, 11, 13)},
    **{f"{more} MiB": (memory, more, "ENOMEM|EAGAIN") for more in (0, 1, 4)},
}


@pytest.fixture
def pod(runtime: Runtime, scratch: Path, plain_rootfs: Path, name: str) -> Iterator[FaultyPod]:
    """A pod with a program in QEMU's place; its shim serves."""
    config = options(stubs.config(scratch))
    binaries = system_calls.PROJECT / "bin"
    with faulty_pod(runtime, binaries, scratch, plain_rootfs, name=name, subnet=77, config=config) as pod:
        pod.start_shim()
        with contextlib.suppress(RemoteError):  # it has imported what it needs to answer
            pod.shim.call("State")
        yield pod


@pytest.mark.parametrize("case", CASES)
def test_a_pod_at_a_limit_is_refused_by_name_and_undone(runtime: Runtime, pod: FaultyPod, case: str) -> None:
    limit, more, hint = CASES[case]
    (shim,) = runtime.shims(pod.name)

    with limit(shim.pid, more):
        pod.live()
        with contextlib.suppress(RemoteError):  # not found is an answer
            pod.shim.call("State", None, 30)
        pod.end()

    assert re.search(hint, str(pod.refused[0]))
    assert system_calls.unanswered(pod) == ""
    pod.clean_up()
    pod.assert_nothing_left()


@pytest.mark.skipif(bool(system_calls.missing()), reason=system_calls.missing())
def test_a_disk_that_takes_a_second_for_each_write_costs_a_pod_time_only(
    runtime: Runtime, pod: FaultyPod, scratch: Path
) -> None:
    (shim,) = runtime.shims(pod.name)
    slow = ["-f", "-qq", "-e", "trace=fsync", "-e", "inject=fsync:delay_enter=1s", "-e", "signal=none"]

    with system_calls.attached(shim.pid, slow, log := scratch / "fsync.strace"):
        pod.live()
        pod.shim.call("State", None, 30)
        pod.end()

    assert log.read_text().count("(DELAYED)") >= 5
    assert pod.refused == []
    pod.clean_up()
    pod.assert_nothing_left()
