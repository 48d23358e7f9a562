"""Processes: started with exactly what they were given, watched, reaped once, and never a stranger's."""

import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from pyshim.host.processes.children import Child, ChildExit, Children
from pyshim.host.processes.launch import SpawnFailed
from pyshim.model.errors import DeadlineExceeded, FailedPrecondition
from pyshim.model.ledger import ResourceKind
from tests.fakes.ledger import FakeLedger

ENV = {"PATH": "/usr/bin:/bin"}
Scenario = Callable[[Children], Coroutine[Any, Any, None]]


def open_fds() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))


@pytest.fixture
def run() -> Iterator[Callable[[Scenario], None]]:
    """Runs a scenario on a fresh `Children`; afterwards every child is reaped and every descriptor closed."""

    def run_it(scenario: Scenario) -> None:
        async def body() -> None:
            children = Children()
            before = open_fds()
            await scenario(children)
            assert children.alive == ()
            assert open_fds() == before

        asyncio.run(body(), debug=True)

    yield run_it
    with pytest.raises(ChildProcessError):
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG)


def shell(script: str) -> list[str]:
    return ["/bin/sh", "-c", script]


async def finished(children: Children, script: str, **options: Any) -> Child:
    child = await children.spawn(shell(script), env=ENV, **options)
    await child.wait()
    return child


@pytest.mark.parametrize(
    ("script", "expected", "text"),
    [
        pytest.param("exit 0", ChildExit(0, 0), "exited with status 0", id="success"),
        pytest.param("exit 77", ChildExit(77, 0), "exited with status 77", id="code"),
        pytest.param("kill -SEGV $$", ChildExit(0, signal.SIGSEGV), "was killed by SIGSEGV", id="signal"),
        pytest.param("kill -35 $$", ChildExit(0, 35), "was killed by signal 35", id="nameless-signal"),
    ],
)
def test_exit_tells_code_or_signal(run: Any, script: str, expected: ChildExit, text: str) -> None:
    async def scenario(children: Children) -> None:
        child = await finished(children, script)

        assert child.exit == expected
        assert child.describe_exit() == f"sh (pid {child.pid}) {text}"

    run(scenario)


def test_last_words_are_complete_when_wait_returns_bounded_and_printable(run: Any) -> None:
    script = r"for i in 1 2 3 4 5; do echo line $i >&2; done; printf '\033[31mred\033[0m\007 end' >&2; exit 1"

    async def scenario(children: Children) -> None:
        child = await finished(children, script, stderr_tail_lines=3)

        assert child.stderr_tail() == "line 4\nline 5\nred end"
        assert child.describe_exit().endswith("exited with status 1: line 4; line 5; red end")

    run(scenario)


def test_a_flood_on_stderr_costs_bounded_memory_and_does_not_block_the_child(run: Any) -> None:
    async def scenario(children: Children) -> None:
        child = await finished(children, "head -c 5000000 /dev/zero | tr '\\0' x >&2; echo >&2; echo done >&2")

        assert child.exit == ChildExit(0, 0)
        assert child.stderr_tail().endswith("\ndone")
        assert len(child.stderr_tail()) <= 20 * 1025

    run(scenario)


def test_a_grandchild_that_keeps_stderr_open_does_not_delay_the_exit(run: Any) -> None:
    async def scenario(children: Children) -> None:
        read_end, write_end = os.pipe()
        try:
            # The grandchild lives as long as our write end of its stdin.
            child = await children.spawn(shell("cat <&3 & echo parent gone >&2"), env=ENV, fds={3: read_end})
            await child.wait()

            assert child.stderr_tail() == "parent gone"
        finally:
            os.close(read_end)
            os.close(write_end)

    run(scenario)


def test_child_has_exactly_the_descriptors_it_was_given(run: Any) -> None:
    async def scenario(children: Children) -> None:
        stray = os.open("/dev/null", os.O_RDONLY)
        os.set_inheritable(stray, True)
        given, peer = socket.socketpair()
        try:
            child = await children.spawn(["/bin/sleep", "600"], env=ENV, fds={7: given.fileno()})
            async with asyncio.timeout(30):
                # While it starts the loader has the libraries open.
                while sorted(os.listdir(f"/proc/{child.pid}/fd"), key=int) != ["0", "1", "2", "7"]:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            await child.end()
        finally:
            os.close(stray)
            given.close()
            peer.close()

    run(scenario)


def test_descriptors_may_trade_numbers(run: Any, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("A")
    (tmp_path / "b").write_text("B")

    async def scenario(children: Children) -> None:
        a, b = os.open(tmp_path / "a", os.O_RDONLY), os.open(tmp_path / "b", os.O_RDONLY)
        # The child's `a` is our b and the other way round: plain dup2s in a row would give it one file twice.
        said = await finished(children, f"cat /proc/$$/fd/{a} /proc/$$/fd/{b} >&2; true", fds={a: b, b: a})
        os.close(a)
        os.close(b)

        assert said.stderr_tail() == "BA"

    run(scenario)


def test_stdio_is_null_unless_given(run: Any) -> None:
    async def scenario(children: Children) -> None:
        child = await finished(children, "said=$(readlink /proc/$$/fd/0 /proc/$$/fd/1); echo $said >&2")
        read_end, write_end = os.pipe()
        try:
            told = await children.spawn(shell("echo out; echo err >&2"), env=ENV, stdout=write_end, stderr=write_end)
            await told.wait()
            said = os.read(read_end, 100)
        finally:
            os.close(read_end)
            os.close(write_end)

        assert child.stderr_tail() == "/dev/null /dev/null"
        assert said == b"out\nerr\n"
        assert told.stderr_tail() == ""

    run(scenario)


def test_child_starts_with_default_signals_and_its_own_session(run: Any) -> None:
    async def scenario(children: Children) -> None:
        assert signal.getsignal(signal.SIGPIPE) is signal.SIG_IGN  # Python's own doing
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
        try:
            _, masks = await children.output(["/bin/grep", "^Sig[BI]", "/proc/self/status"], env=ENV, timeout_s=30)
            _, stat = await children.output(["/bin/cat", "/proc/self/stat"], env=ENV, timeout_s=30)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})

        blocked, ignored = (int(line.split()[1], 16) for line in masks.splitlines())
        threading_signals = 0b11 << 31  # 32 and 33: the C library's own, nobody can set them
        assert (blocked, ignored & ~threading_signals) == (0, 0)
        pid, session = stat.split()[0], stat.split()[5]
        assert pid == session

    run(scenario)


def test_environment_is_only_what_was_given(run: Any) -> None:
    async def scenario(children: Children) -> None:
        child = await children.spawn(["/usr/bin/env"], env={"A": "b"}, stdout=None, stderr=None)
        await child.wait()
        _, output = await children.output(["/usr/bin/env"], env={"A": "b"}, timeout_s=10)

        assert output == b"A=b\n"

    run(scenario)


@pytest.mark.parametrize(
    ("argv", "cause"),
    [
        pytest.param(["/nonexistent/program"], "ENOENT (no such file or directory)", id="missing"),
        pytest.param(["/etc/passwd"], "EACCES (permission denied)", id="not-executable"),
        pytest.param(["/"], "EACCES (permission denied)", id="directory"),
    ],
)
def test_unstartable_program_is_named_with_its_cause(run: Any, argv: list[str], cause: str) -> None:
    async def scenario(children: Children) -> None:
        ledger = FakeLedger()

        with pytest.raises(SpawnFailed) as caught:
            await children.spawn(argv, env=ENV, ledger=ledger, ledger_key=argv[0])

        assert str(caught.value) == f"start program {argv[0]!r}: {cause}"
        assert ledger.held == {}

    run(scenario)


def test_intent_is_written_before_the_process_exists_and_its_pid_after(run: Any) -> None:
    async def scenario(children: Children) -> None:
        ledger = FakeLedger()
        child = await finished(children, "exit 0 # the-key", ledger=ledger, ledger_key="the-key")

        first, second = (entry for _, entry in ledger.history)
        assert (first.kind, first.key, dict(first.detail)) == (ResourceKind.PROCESS, "the-key", {"program": "/bin/sh"})
        assert second.detail == {**first.detail, "pid": child.pid, "start_ticks": child.start_ticks}

    run(scenario)


def test_nothing_is_started_when_the_intent_cannot_be_written(run: Any, tmp_path: Path) -> None:
    mark = tmp_path / "started"

    async def scenario(children: Children) -> None:
        with pytest.raises(FailedPrecondition, match="ENOSPC"):
            await children.spawn(shell(f"touch {mark}"), env=ENV, ledger=FakeLedger(full_after=0), ledger_key=str(mark))

        assert not mark.exists()

    run(scenario)


def test_process_whose_pid_cannot_be_written_down_is_ended(run: Any) -> None:
    async def scenario(children: Children) -> None:
        ledger = FakeLedger(full_after=1)

        with pytest.raises(FailedPrecondition, match="ENOSPC"):
            await children.spawn(shell("sleep 1000 # key"), env=ENV, ledger=ledger, ledger_key="key")

        assert children.alive == ()
        assert ledger.held == {}

    run(scenario)


def test_every_waiter_gets_the_same_answer_and_cancelling_one_disturbs_none(run: Any) -> None:
    async def scenario(children: Children) -> None:
        child = await children.spawn(["/bin/cat"], env=ENV, stdin=(pipe := os.pipe())[0])
        waiters = [asyncio.create_task(child.wait()) for _ in range(3)]
        await asyncio.sleep(0)
        waiters[0].cancel()
        for fd in pipe:
            os.close(fd)

        assert await asyncio.gather(*waiters[1:]) == [ChildExit(0, 0)] * 2
        assert waiters[0].cancelled()

    run(scenario)


def test_kill_reaches_the_living_and_says_no_for_the_dead(run: Any) -> None:
    async def scenario(children: Children) -> None:
        child = await children.spawn(shell("sleep 1000"), env=ENV)

        assert child.kill(signal.SIGTERM)
        assert await child.wait() == ChildExit(0, signal.SIGTERM)
        assert not child.kill()

    run(scenario)


def test_end_kills_what_ignores_the_polite_signal(run: Any) -> None:
    async def scenario(children: Children) -> None:
        script = (
            "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); signal.pause()"
        )
        read_end, write_end = os.pipe()
        child = await children.spawn([sys.executable, "-I", "-S", "-c", script], env=ENV, stdout=write_end)
        os.close(write_end)
        await asyncio.to_thread(os.read, read_end, 10)
        os.close(read_end)

        assert await child.end(signal_number=signal.SIGTERM, grace_s=0.2) == ChildExit(0, signal.SIGKILL)

    run(scenario)


def test_end_all_leaves_no_child(run: Any) -> None:
    async def scenario(children: Children) -> None:
        for _ in range(3):
            await children.spawn(shell("sleep 1000"), env=ENV)

        assert len(children.alive) == 3
        await children.end_all()

    run(scenario)


def test_output_is_what_the_program_wrote_up_to_a_limit(run: Any) -> None:
    async def scenario(children: Children) -> None:
        argv = shell("head -c 300000 /dev/zero; exit 4")

        ended, output = await children.output(argv, env=ENV, timeout_s=30, max_bytes=1000)

        assert (ended, output) == (ChildExit(4, 0), bytes(1000))

    run(scenario)


def test_output_of_a_program_that_does_not_end_is_a_deadline(run: Any) -> None:
    async def scenario(children: Children) -> None:
        with pytest.raises(DeadlineExceeded, match=r"run program '/bin/sh': no end within 0\.2 s"):
            await children.output(shell("echo started; exec sleep 1000"), env=ENV, timeout_s=0.2)

    run(scenario)


@pytest.mark.parametrize(
    ("path", "cause"),
    [
        pytest.param("/run/netns/none-such", "ENOENT", id="missing"),
        pytest.param("/dev/null", "EINVAL", id="not-a-namespace"),
    ],
)
def test_wrong_network_namespace_is_named(run: Any, path: str, cause: str) -> None:
    async def scenario(children: Children) -> None:
        with pytest.raises(SpawnFailed, match=f"enter network namespace '{path}': {cause}"):
            await children.spawn(shell("exit 0"), env=ENV, netns_path=path)

    run(scenario)


@pytest.mark.root
def test_child_runs_in_the_network_namespace_and_we_do_not(run: Any) -> None:
    async def scenario(children: Children) -> None:
        own = os.readlink("/proc/thread-self/ns/net")
        holder_script = "readlink /proc/self/ns/net; exec cat"
        keep_read, keep_write = os.pipe()
        said_read, said_write = os.pipe()
        holder = await children.spawn(
            ["/usr/bin/unshare", "--net", "/bin/sh", "-c", holder_script], env=ENV, stdin=keep_read, stdout=said_write
        )
        os.close(said_write)
        other = (await asyncio.to_thread(os.read, said_read, 100)).decode().strip()

        child = await finished(children, "readlink /proc/$$/ns/net >&2", netns_path=f"/proc/{holder.pid}/ns/net")

        assert child.stderr_tail() == other != own
        assert os.readlink("/proc/thread-self/ns/net") == own
        for fd in (keep_read, keep_write, said_read):
            os.close(fd)
        await holder.wait()

    run(scenario)


def test_cancelled_start_in_a_namespace_leaves_no_process(run: Any) -> None:
    async def scenario(children: Children) -> None:
        starting = asyncio.create_task(
            children.spawn(shell("exec sleep 1000"), env=ENV, netns_path="/proc/self/ns/net")
        )
        await asyncio.sleep(0)
        starting.cancel()

        with pytest.raises(asyncio.CancelledError):
            await starting

    if os.geteuid() == 0:
        run(scenario)


def test_a_full_descriptor_table_is_an_error_and_leaks_none(run: Any) -> None:
    async def attempt(children: Children) -> str:
        try:
            child = await children.spawn(shell("exit 0"), env=ENV)
        except SpawnFailed as error:
            return str(error)
        return str(await child.wait())

    async def scenario(children: Children) -> None:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest_free = os.dup(0)
        os.close(lowest_free)
        highest = max(map(int, open_fds()))
        said: list[str] = []
        # How many descriptors a spawn needs is the interpreter's business, and which numbers are free is the
        # machine's: the limit is raised until one spawn succeeds.
        for limit in range(lowest_free, highest + 100):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limits[1]))
            try:
                said.append(await attempt(children))
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            if said[-1] == "exited with status 0":
                break

        assert said[-1] == "exited with status 0"
        assert len(said) > 1
        assert all(line.startswith("start program '/bin/sh': E") for line in said[:-1])

    run(scenario)


class Unkillable(Child):
    """As a process in an uninterruptible wait is: signals reach it and change nothing."""

    def kill(self, signal_number: int = signal.SIGKILL) -> bool:
        return True


def test_a_child_that_sigkill_does_not_end_is_given_up(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(children: Children) -> None:
        monkeypatch.setattr("pyshim.host.processes.children.KILL_WAIT_S", 0.05)
        with subprocess.Popen(["sleep", "600"]) as process:  # noqa: ASYNC220 - a child nobody else reaps
            stuck = Unkillable(
                name="stuck", pid=process.pid, stderr_fd=None, tail_lines=1, on_exit=lambda child: ended.append(child)
            )
            ended: list[Child] = []

            with pytest.raises(DeadlineExceeded, match=rf"end stuck \(pid {process.pid}\): it lives .* after SIGKILL"):
                await stuck.end()

            other = await children.spawn(shell("sleep 600"), env=ENV)
            children._alive[stuck.pid] = stuck
            await children.end_all()
            del children._alive[stuck.pid]
            assert other.exit is not None
            Child.kill(stuck)
            await stuck.wait()
            process.returncode = -signal.SIGKILL  # reaped by its pidfd

    run(scenario)
