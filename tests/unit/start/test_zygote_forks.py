"""The children of the zygote: whose they are, which control groups they join, and when they end."""

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

from pyshim.start import zygote as link


@pytest.mark.root
def test_a_forked_daemon_joins_the_control_groups_of_its_caller(bare_bench: StartBench) -> None:
    zygote = bare_bench.with_zygote()
    with own_cgroup() as (name, procs):
        shell = "; ".join(f"echo $$ > {path}" for path in procs)

        found = report(bare_bench, "c1", shell=shell)

        assert found["parent"] == zygote.pid
        assert found["cgroups"].count(f"/{name}\n") == len(procs)
        assert name not in Path(f"/proc/{zygote.pid}/cgroup").read_text()
        assert is_forked(bare_bench, "c2")
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


def test_a_zygote_that_does_not_answer_is_given_up_and_its_child_never_serves(bare_bench: StartBench) -> None:
    """When it goes on, it takes the request, its child finds the caller gone, and ends."""
    zygote = bare_bench.with_zygote()
    os.kill(zygote.pid, signal.SIGSTOP)

    found = report(bare_bench, "c1", env={"PYSHIM_ZYGOTE_WITHIN_S": "0.1"})
    os.kill(zygote.pid, signal.SIGCONT)

    assert (found["frozen"], found["reason"]) == (0, "the zygote did not answer within 0.1 s")
    assert is_forked(bare_bench, "c2"), zygote.said
    assert len(bare_bench.alive()) == 2


def test_a_child_goes_on_when_the_zygote_is_killed(bare_bench: StartBench) -> None:
    zygote = bare_bench.with_zygote()
    forked = report(bare_bench, "c1")

    zygote.process.kill()
    zygote.process.wait(30)

    assert bare_bench.alive() == [forked["pid"]]


def test_a_daemon_that_is_not_released_ends(bare_bench: StartBench) -> None:
    zygote = bare_bench.with_zygote()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(bare_bench.root / "l"))
        forked = fork_by_hand(bare_bench, listener.fileno())
        (child,) = children_of(zygote.pid)

        forked.end()

        ended(child)
    assert not bare_bench.daemons()


def test_a_caller_that_asks_nothing_is_refused_after_a_while_and_others_are_served(bare_bench: StartBench) -> None:
    zygote = bare_bench.with_zygote()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.connect(link.address(str(bare_bench.zygote_dir)))

        assert is_forked(bare_bench, "c1"), zygote.said
        silent.settimeout(30)
        assert silent.recv(link.MAX_REPLY_BYTES) == b"no: the request did not come within 1 s"


def test_a_caller_that_hangs_up_without_a_request_costs_no_child(bare_bench: StartBench) -> None:
    zygote = bare_bench.with_zygote()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(link.address(str(bare_bench.zygote_dir)))

    assert is_forked(bare_bench, "c1"), zygote.said
    assert len(children_of(zygote.pid)) == 1


def test_the_zygote_keeps_no_descriptor_of_its_callers(bare_bench: StartBench) -> None:
    zygote = bare_bench.with_zygote()
    before = len(os.listdir(f"/proc/{zygote.pid}/fd"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock, open(os.devnull) as file:
        sock.connect(link.address(str(bare_bench.zygote_dir)))
        socket.send_fds(sock, [b"no request"], [file.fileno()] * 2)
        assert sock.recv(link.MAX_REPLY_BYTES).startswith(link.NO)

    assert is_forked(bare_bench, "c1"), zygote.said
    assert is_forked(bare_bench, "c2"), zygote.said
    # The last caller may have its answer before the zygote goes on.
    deadline = time.monotonic() + 30
    while len(os.listdir(f"/proc/{zygote.pid}/fd")) != before:
        assert time.monotonic() < deadline, os.listdir(f"/proc/{zygote.pid}/fd")
        time.sleep(0.005)


def test_a_container_of_a_pod_that_has_its_shim_costs_no_fork(bare_bench: StartBench) -> None:
    zygote = bare_bench.with_zygote()
    shim = report(bare_bench, "p1")
    os.kill(zygote.pid, signal.SIGSTOP)
    pod = {"io.kubernetes.cri.container-type": "container", "io.kubernetes.cri.sandbox-id": "p1"}

    result = bare_bench.start(bare_bench.bundle("c1", annotations=pod))

    os.kill(zygote.pid, signal.SIGCONT)
    assert (result.returncode, bare_bench.alive()) == (0, [shim["pid"]])


def test_a_request_too_large_for_one_message_is_executed(bare_bench: StartBench) -> None:
    bare_bench.with_zygote()
    environment = {f"LARGE{number}": "x" * 100_000 for number in range(8)}

    found = report(bare_bench, "c1", env=environment)

    assert found["frozen"] == 0
    assert found["reason"].endswith("EMSGSIZE (message too long)")


def fork_by_hand(bench: StartBench, listening_fd: int) -> link.Forked:
    return link.fork_daemon(
        str(bench.zygote_dir),
        [sys.executable, "-I", "-S", "daemon"],
        ["serve"],
        environment={"PYSHIM_ZYGOTE_WITHIN_S": "30"},
        listening_fd=listening_fd,
        log_path=os.devnull,
        shim_cgroup="",
    )


def ended(*pids: int) -> None:
    """The processes end soon."""
    deadline = time.monotonic() + 30
    for pid in pids:
        while is_alive(pid):
            assert time.monotonic() < deadline, f"{pid} lives"
            time.sleep(0.005)
