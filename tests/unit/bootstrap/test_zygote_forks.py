"""The zygote's fork that waits: who it is for, where it waits, and when it ends."""

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from start_bench import StartBench, children_of, is_alive, is_forked, report

from pyshim.bootstrap import zygote as link


@pytest.mark.root
def test_a_forked_daemon_joins_the_control_groups_of_its_caller_and_the_next_waits_there(
    bare_bench: StartBench,
) -> None:
    zygote = bare_bench.with_zygote()
    with own_cgroup() as (name, procs):
        shell = "; ".join(f"echo $$ > {path}" for path in procs)

        found = report(bare_bench, "c1", shell=shell)

        assert found["parent"] == zygote.pid
        assert found["cgroups"].count(f"/{name}\n") == len(procs)
        next_one = waiting_fork(zygote.pid, but=found["pid"])
        deadline = time.monotonic() + 60
        while Path(f"/proc/{next_one}/cgroup").read_text() != found["cgroups"]:
            assert time.monotonic() < deadline, Path(f"/proc/{next_one}/cgroup").read_text()
            time.sleep(0.005)
        assert name not in Path(f"/proc/{zygote.pid}/cgroup").read_text()
        assert is_forked(bare_bench, "c2")  # by the one that has moved there, from elsewhere
        bare_bench.close()


@contextmanager
def own_cgroup() -> Iterator[tuple[str, list[str]]]:
    """A new cgroup below this process's own in every hierarchy where that can be made, as name and `cgroup.procs`."""
    name = f"zygote-test-{os.getpid()}"
    ours = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    made = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, right = line.split(" - ")
        fs_type, _, options = right.split()
        if fs_type not in ("cgroup", "cgroup2"):
            continue
        key = next((k for k in ours if k and set(k.split(",")) <= set(options.split(","))), "")
        if "cpuset" in key:
            continue  # a new one takes no process before it has been given cpus
        root, mount_point = left.split()[3:5]
        path = Path(f"{mount_point}/{ours[key].removeprefix(root.rstrip('/'))}/{name}")
        try:
            path.mkdir()
        except OSError:
            continue
        made.append(path)
    if not made:
        pytest.skip("no control group can be made here")
    try:
        yield name, [str(path / "cgroup.procs") for path in made]
    finally:
        deadline = time.monotonic() + 20
        while made:
            try:
                made[-1].rmdir()
                made.pop()
            except OSError:
                assert time.monotonic() < deadline, f"still in use: {made}"
                time.sleep(0.01)


def test_a_fork_that_does_not_answer_is_given_up_and_serves_nobody_later(bare_bench: StartBench) -> None:
    """When it goes on, it takes the request, finds its caller gone, and ends."""
    zygote = bare_bench.with_zygote()
    waiting = waiting_fork(zygote.pid)
    os.kill(waiting, signal.SIGSTOP)

    found = report(bare_bench, "c1", patient=False)
    os.kill(waiting, signal.SIGCONT)

    assert found["frozen"] == 0
    assert is_forked(bare_bench, "c2"), zygote.said
    assert len(bare_bench.alive()) == 2


def test_the_fork_that_waits_ends_with_the_zygote(bare_bench: StartBench) -> None:
    zygote = bare_bench.with_zygote()
    waiting = waiting_fork(zygote.pid)

    zygote.process.kill()
    zygote.process.wait(30)

    deadline = time.monotonic() + 60
    while is_alive(waiting):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert report(bare_bench, "c1")["frozen"] == 0


def test_a_fork_that_is_lost_while_it_waits_is_replaced(bare_bench: StartBench) -> None:
    zygote = bare_bench.with_zygote()
    waiting = waiting_fork(zygote.pid)
    os.kill(waiting, signal.SIGKILL)

    assert is_forked(bare_bench, "c1"), zygote.said


def test_a_daemon_that_is_not_released_ends(bare_bench: StartBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "ANSWER_WITHIN_S", 30.0)  # the limit of `start` is short, and this machine may be busy
    zygote = bare_bench.with_zygote()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(bare_bench.root / "l"))
        child = waiting_fork(zygote.pid)
        forked = fork_by_hand(bare_bench, listener.fileno())
        assert forked is not None, zygote.said

        forked.end()

        deadline = time.monotonic() + 30
        while is_alive(child) and time.monotonic() < deadline:
            time.sleep(0.005)
    assert not is_alive(child)
    assert not bare_bench.daemons()


def test_a_caller_that_takes_its_time_to_ask_is_in_nobodys_way(bare_bench: StartBench) -> None:
    zygote = bare_bench.with_zygote()
    connection = link.connect({}, str(bare_bench.zygote_dir))
    assert connection is not None
    try:
        assert is_forked(bare_bench, "c1"), zygote.said
    finally:
        connection.close()
    assert is_forked(bare_bench, "c2"), zygote.said


def test_a_container_of_a_pod_that_has_its_shim_costs_no_fork(bare_bench: StartBench) -> None:
    zygote = bare_bench.with_zygote()
    shim = report(bare_bench, "p1")
    waiting = waiting_fork(zygote.pid, but=shim["pid"])
    pod = {"io.kubernetes.cri.container-type": "container", "io.kubernetes.cri.sandbox-id": "p1"}

    assert bare_bench.start(bare_bench.bundle("c1", annotations=pod)).returncode == 0, zygote.said

    assert waiting_fork(zygote.pid, but=shim["pid"]) == waiting


def fork_by_hand(bench: StartBench, listening_fd: int) -> link.Forked | None:
    log_fd = os.open(os.devnull, os.O_RDWR)
    connection = link.connect({}, str(bench.zygote_dir))
    assert connection is not None
    try:
        return link.fork_daemon(
            connection,
            [sys.executable, "-I", "-S", "daemon"],
            ["serve"],
            environment={},
            listening_fd=listening_fd,
            log_fd=log_fd,
            shim_cgroup="",
        )
    finally:
        os.close(log_fd)


def waiting_fork(zygote: int, *, but: int = 0) -> int:
    """The fork that waits for the next caller, beside any daemon `but`."""
    deadline = time.monotonic() + 60
    while len(found := set(children_of(zygote)) - {but}) != 1:
        assert time.monotonic() < deadline, found
        time.sleep(0.005)
    return found.pop()
