"""The undo of a process: killed by pid and start time, or found by its command line; its family goes with it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pyshim.cleanup.release import release
from pyshim.host.processes import identity as processes
from pyshim.model.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument
from pyshim.model.ledger import LedgerEntry, ResourceKind
from tests.unit.cleanup.test_release import entry, twice


def ticks(process: subprocess.Popen[Any]) -> int:
    found = processes.start_ticks(process.pid)
    assert found is not None
    return found


def known(process: subprocess.Popen[Any], **other: str | int) -> LedgerEntry:
    """The entry of a process whose pid was written down."""
    found = processes.ProcessRef(process.pid, ticks(process))
    detail = {"pid": process.pid, "start_ticks": found.start_ticks, "program": processes.executable(found)}
    return entry(ResourceKind.PROCESS, "some-long-key", **(detail | other))


def test_a_process_dies_by_pid_and_start_time(sleeper: subprocess.Popen[bytes]) -> None:
    twice(known(sleeper))

    assert sleeper.wait() == -signal.SIGKILL


def test_what_a_process_started_dies_with_it() -> None:
    script = "sleep 600 & echo $!; wait"
    with subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        found = known(parent)

        twice(found)

        assert processes.start_ticks(child) is None
        assert parent.wait() == -signal.SIGKILL


_FORKS = """
import os, sys, time
print(flush=True)
for _ in range(1000):
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    time.sleep(0.001)
time.sleep(60)
"""


def test_what_a_process_starts_while_it_is_killed_dies_with_it(tmp_path: Path) -> None:
    word = str(tmp_path / "family")
    argv = [sys.executable, "-I", "-S", "-c", _FORKS, word]
    for _ in range(3):
        with subprocess.Popen(argv, stdout=subprocess.PIPE) as parent:
            assert parent.stdout is not None
            parent.stdout.readline()

            release(known(parent))

            left = processes.find_by_argument(word)
            for each in left:
                processes.kill(each, time.monotonic() + 30)
        assert left == ()


def test_what_an_unkillable_process_started_is_not_left_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """In uninterruptible I/O, say: its end does not come in time, and its children's was never asked for."""

    def in_vain(process: processes.ProcessRef, _deadline: float) -> None:
        raise DeadlineExceeded(f"kill process {process.pid}: it did not end in time")

    monkeypatch.setattr(processes, "kill", in_vain)
    with subprocess.Popen(["sh", "-c", "sleep 600 & echo $!; wait"], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        found = processes.ProcessRef(parent.pid, ticks(parent))
        fd = os.pidfd_open(child)
        try:
            with pytest.raises(DeadlineExceeded, match=str(parent.pid)):
                processes.kill_family(found, time.monotonic() + 30)

            assert select.select([fd], [], [], 30)[0], "the child lives on, stopped"
        finally:
            os.close(fd)
            os.kill(parent.pid, signal.SIGKILL)


def test_a_successor_of_the_pid_is_left_alone(sleeper: subprocess.Popen[bytes]) -> None:
    twice(known(sleeper, start_ticks=ticks(sleeper) - 1))

    assert sleeper.poll() is None


def test_a_process_whose_pid_was_never_written_down_is_found_by_its_command_line(
    sleeper: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    twice(entry(ResourceKind.PROCESS, tmp_path / "key", program=sys.executable))

    assert sleeper.wait() == -signal.SIGKILL


def test_a_process_that_has_the_word_but_is_another_program_is_left_alone(
    sleeper: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    """A process that looks for a VM by its UUID has the UUID in its own command line."""
    release(entry(ResourceKind.PROCESS, tmp_path / "key", program="/usr/bin/qemu-system-x86_64"))
    assert sleeper.poll() is None

    twice(entry(ResourceKind.PROCESS, tmp_path / "key", program=sys.executable))
    assert sleeper.wait() == -signal.SIGKILL


def test_a_process_of_the_pid_and_start_time_that_is_neither_the_program_nor_has_the_key_is_left_alone(
    sleeper: subprocess.Popen[bytes],
) -> None:
    release(known(sleeper, program="/usr/bin/qemu-system-x86_64"))

    assert sleeper.poll() is None


def test_a_wrapper_that_has_become_its_program_is_known_by_the_key(
    sleeper: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    detail = {"pid": sleeper.pid, "start_ticks": ticks(sleeper)}

    release(entry(ResourceKind.PROCESS, tmp_path / "key", program="/opt/qemu-wrapper", **detail))

    assert sleeper.wait() == -signal.SIGKILL


def test_an_entry_without_a_program_ends_no_process(sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match="names no program"):
        release(entry(ResourceKind.PROCESS, tmp_path / "key", pid=sleeper.pid, start_ticks=ticks(sleeper)))

    assert sleeper.poll() is None


def test_a_program_that_is_a_script_is_known_by_the_script(tmp_path: Path) -> None:
    script = tmp_path / "wrapper"
    script.write_text("#!/bin/sh\necho up\nread line\n")
    script.chmod(0o755)
    with subprocess.Popen([script, "the-long-key"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()

        twice(entry(ResourceKind.PROCESS, "the-long-key", program=str(script)))

        assert process.wait() == -signal.SIGKILL


def test_a_search_does_not_hit_others_nor_ourselves(sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    release(entry(ResourceKind.PROCESS, tmp_path / "other-key", program=sys.executable))
    release(entry(ResourceKind.PROCESS, sys.orig_argv[-1] + "-no-such-word", program=sys.executable))

    assert sleeper.poll() is None


@pytest.mark.parametrize("key", ["", "a", "qemu"])
def test_a_search_for_a_word_of_many_command_lines_is_refused(key: str) -> None:
    with pytest.raises(InvalidArgument, match="too short"):
        release(entry(ResourceKind.PROCESS, key, program=sys.executable))


def test_a_zombie_counts_as_gone(sleeper: subprocess.Popen[bytes]) -> None:
    found = processes.ProcessRef(sleeper.pid, ticks(sleeper))
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)

    assert not processes.is_alive(found)
    processes.kill(found, time.monotonic())


def test_waiting_for_a_process_ends_at_the_deadline(sleeper: subprocess.Popen[bytes]) -> None:
    fd = os.pidfd_open(sleeper.pid)
    try:
        with pytest.raises(DeadlineExceeded, match=str(sleeper.pid)):
            processes.wait_gone(fd, sleeper.pid, time.monotonic() + 0.05)
    finally:
        os.close(fd)
