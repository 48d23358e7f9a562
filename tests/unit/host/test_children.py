"""Processes: watched, reaped once, and never a stranger's."""

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from pyshim.host.processes.children import Child, ChildExit, Children
from pyshim.host.processes.identity import family
from pyshim.host.processes.stat import stat_fields
from pyshim.model.errors import DeadlineExceeded, FailedPrecondition
from pyshim.model.ledger import ResourceKind
from tests.fakes.ledger import FakeLedger
from tests.unit.host.child_scenarios import ENV, finished, shell


@pytest.mark.parametrize(
    ("script", "expected", "text"),
    [
        pytest.param("exit 0", ChildExit(0, 0), "exited with status 0", id="success"),
        pytest.param("exit 77", ChildExit(77, 0), "exited with status 77", id="code"),
        pytest.param("kill -SEGV $$", ChildExit(0, signal.SIGSEGV), "was killed by SIGSEGV", id="signal"),
        pytest.param("kill -35 $$", ChildExit(0, 35), "was killed by signal 35", id="nameless-signal"),
    ],
)
async def test_exit_tells_code_or_signal(script: str, expected: ChildExit, text: str, children: Children) -> None:
    child = await finished(children, script)

    assert child.exit == expected
    assert child.describe_exit() == f"sh (pid {child.pid}) {text}"


async def test_last_words_are_complete_when_wait_returns_bounded_and_printable(children: Children) -> None:
    script = r"for i in 1 2 3 4 5; do echo line $i >&2; done; printf '\033[31mred\033[0m\007 end' >&2; exit 1"

    child = await finished(children, script, stderr_tail_lines=3)

    assert child.last_words() == ("line 4", "line 5", "red end")
    assert child.describe_exit().endswith("exited with status 1: line 4; line 5; red end")


async def test_a_flood_on_stderr_costs_bounded_memory_and_does_not_block_the_child(children: Children) -> None:
    child = await finished(children, "head -c 1000000 /dev/zero | tr '\\0' x >&2; echo >&2; echo done >&2")

    assert child.exit == ChildExit(0, 0)
    assert child.last_words()[-1] == "done"
    assert sum(map(len, child.last_words())) <= 20 * 1024


async def test_a_grandchild_that_keeps_stderr_open_does_not_delay_the_exit(children: Children) -> None:
    read_end, write_end = os.pipe()
    try:
        # The grandchild lives as long as our write end of its stdin.
        child = await children.spawn(shell("cat <&3 & echo parent gone >&2"), env=ENV, fds={3: read_end})
        await child.wait()

        assert child.last_words() == ("parent gone",)
    finally:
        os.close(read_end)
        os.close(write_end)


async def test_intent_is_written_before_the_process_exists_and_its_pid_after(children: Children) -> None:
    ledger = FakeLedger()
    child = await finished(children, "exit 0 # the-key", ledger=ledger, ledger_key="the-key")

    first, second = (entry for _, entry in ledger.history)
    assert (first.kind, first.key, dict(first.detail)) == (ResourceKind.PROCESS, "the-key", {"program": "/bin/sh"})
    assert second.detail == {**first.detail, "pid": child.pid, "start_ticks": child.start_ticks}


async def test_nothing_is_started_when_the_intent_cannot_be_written(tmp_path: Path, children: Children) -> None:
    mark = tmp_path / "started"

    with pytest.raises(FailedPrecondition, match="ENOSPC"):
        await children.spawn(shell(f"touch {mark}"), env=ENV, ledger=FakeLedger(full_after=0), ledger_key=str(mark))

    assert not mark.exists()


async def test_process_whose_pid_cannot_be_written_down_is_ended(children: Children) -> None:
    ledger = FakeLedger(full_after=1)

    with pytest.raises(FailedPrecondition, match="ENOSPC"):
        await children.spawn(shell("sleep 1000 # key"), env=ENV, ledger=ledger, ledger_key="key")

    assert children.alive == ()
    assert ledger.held == {}


async def test_every_waiter_gets_the_same_answer_and_cancelling_one_disturbs_none(children: Children) -> None:
    child = await children.spawn(["/bin/cat"], env=ENV, stdin=(pipe := os.pipe())[0])
    waiters = [asyncio.create_task(child.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    waiters[0].cancel()
    for fd in pipe:
        os.close(fd)

    assert await asyncio.gather(*waiters[1:]) == [ChildExit(0, 0)] * 2
    assert waiters[0].cancelled()


async def test_kill_reaches_the_living_and_says_no_for_the_dead(children: Children) -> None:
    child = await children.spawn(shell("sleep 1000"), env=ENV)

    assert child.kill(signal.SIGTERM)
    assert await child.wait() == ChildExit(0, signal.SIGTERM)
    assert not child.kill()


async def test_end_kills_what_ignores_the_polite_signal(children: Children) -> None:
    script = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); signal.pause()"
    read_end, write_end = os.pipe()
    child = await children.spawn([sys.executable, "-I", "-S", "-c", script], env=ENV, stdout=write_end)
    os.close(write_end)
    await asyncio.to_thread(os.read, read_end, 10)
    os.close(read_end)

    assert await child.end(signal_number=signal.SIGTERM, grace_s=0.2) == ChildExit(0, signal.SIGKILL)


async def test_end_all_leaves_no_child(children: Children) -> None:
    for _ in range(3):
        await children.spawn(shell("sleep 1000"), env=ENV)

    assert len(children.alive) == 3
    await children.end_all()


async def test_output_is_what_the_program_wrote_up_to_a_limit(children: Children) -> None:
    argv = shell("head -c 300000 /dev/zero; exit 4")

    ended, output = await children.output(argv, env=ENV, timeout_s=30, max_bytes=1000)

    assert (ended, output) == (ChildExit(4, 0), bytes(1000))


async def test_output_of_a_program_that_does_not_end_is_a_deadline(children: Children) -> None:
    with pytest.raises(DeadlineExceeded, match=r"run program '/bin/sh': no end within 0\.2 s"):
        await children.output(shell("echo started; exec sleep 1000"), env=ENV, timeout_s=0.2)


class Unkillable(Child):
    """As a process in an uninterruptible wait is: signals reach it and change nothing."""

    def kill(self, signal_number: int = signal.SIGKILL) -> bool:
        return True


async def test_a_child_that_sigkill_does_not_end_is_given_up(
    monkeypatch: pytest.MonkeyPatch, children: Children
) -> None:
    monkeypatch.setattr("pyshim.host.processes.children.KILL_WAIT_S", 0.05)
    with subprocess.Popen(["sleep", "600"]) as process:
        stuck = Unkillable(
            name="stuck", pid=process.pid, stderr=None, tail_lines=1, on_exit=lambda child: ended.append(child)
        )
        ended: list[Child] = []

        with pytest.raises(DeadlineExceeded, match=rf"end stuck \(pid {process.pid}\): it lives .* after SIGKILL"):
            await stuck.end()

        other = await children.spawn(shell("sleep 600"), env=ENV)
        children._alive[stuck.pid] = stuck
        try:
            await children.end_all()
            await other.wait()  # it was killed, whether or not that took longer than the limit
        finally:
            del children._alive[stuck.pid]
            Child.kill(stuck)
        await stuck.wait()
        process.returncode = -signal.SIGKILL  # reaped by its pidfd


FORKS_WHEN_ASKED = "while read -r _; do sleep 1000 & echo $!; done"


def test_a_child_forked_while_its_parent_is_moved_is_in_the_family() -> None:
    parent = subprocess.Popen(
        ("sh", "-c", FORKS_WHEN_ASKED), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    forked, moved = [], []

    def fork() -> None:
        parent.stdin.write("\n")
        forked.append(int(parent.stdout.readline()))

    try:
        fork()
        for pid in family((parent.pid,)):
            if len(moved) < 2:
                fork()  # once as the parent is moved, once as its first child is
            moved.append(pid)

        assert moved[0] == parent.pid
        assert sorted(moved[1:]) == sorted(forked)
    finally:
        for pid in (*forked, parent.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        parent.communicate()


def test_the_family_of_a_process_that_is_gone_is_its_number_alone() -> None:
    gone = subprocess.Popen(("true",))
    gone.wait()

    assert list(family((gone.pid,))) == [gone.pid]


@pytest.mark.parametrize("name", ["sh", "a b", "x) R 7 (y", "näme\udcff"], ids=ascii)
def test_the_fields_begin_after_the_last_parenthesis_of_the_name(tmp_path: Path, name: str) -> None:
    directory = tmp_path / "42"
    directory.mkdir()
    (directory / "stat").write_bytes(b"42 (" + name.encode(errors="surrogateescape") + b") S 1 42 42 0 -1\n")

    assert stat_fields(42, str(tmp_path)) == [b"S", b"1", b"42", b"42", b"0", b"-1"]
