"""The guest agent's children, in a process of its own, which may reap everything."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from guest.agent.children import find_program

REPOSITORY = Path(__file__).resolve().parents[4]
_PROGRAM = """
import asyncio, itertools, os, signal, tempfile
from pathlib import Path
from guest.agent.children import Children
from guest.agent.errors import DeadlineExceeded, Internal
from guest.agent.syscalls import become_subreaper

def orphan_of_a_shell(commands):
    # Starts the commands in the background and prints their pid. They wait for the end of the shell, whose end of the
    # FIFO is the last: a shell reaps a background process that ends before it does.
    fifo = f"{directory}/{next(numbers)}"
    os.mkfifo(fifo)
    return f"exec 9<>{fifo}; (exec 8<{fifo} 9>&-; read _ <&8; {commands}) & echo $!"

async def body(children):
{body}

async def main():
    children = Children()
    children.start()
    await body(children)

numbers = itertools.count()
with tempfile.TemporaryDirectory() as directory:
    asyncio.run(main())
"""


def children_test(body: str) -> str:
    """The output of the body of a coroutine with `children`."""
    program = _PROGRAM.replace("{body}", textwrap.indent(textwrap.dedent(body), "    "))
    argv = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=100, cwd=REPOSITORY)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_run_gives_code_output_and_feeds_stdin() -> None:
    out = children_test(
        """
        done = await children.run(["/bin/sh", "-c", "wc -c; echo err >&2; exit 7"], stdin=bytes(300000))
        print(done.code, done.stdout.split(), done.stderr, done.complaint)
        """
    )

    assert out == "7 [b'300000'] b'err\\n' err\n"


def test_of_much_output_the_first_mebibyte_is_kept() -> None:
    out = children_test(
        """
        done = await children.run(["/bin/sh", "-c", "head -c 3000000 /dev/zero"])
        print(done.code, len(done.stdout))
        """
    )

    assert out == f"0 {1 << 20}\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM], ids=lambda number: number.name)
def test_death_by_signal_is_128_plus_its_number(number: signal.Signals) -> None:
    out = children_test(f'print((await children.run(["/bin/sh", "-c", "kill -{int(number)} $$"])).code)')

    assert int(out) == 128 + number


def test_a_child_that_runs_too_long_is_killed_and_named() -> None:
    out = children_test(
        """
        for doing in ("", "wait for nothing"):
            try:
                await children.run(["/bin/sleep", "1000"], timeout_s=0.1, doing=doing)
            except DeadlineExceeded as error:
                print(error)
        while children._running:
            await asyncio.sleep(0.01)
        """
    )

    assert out.splitlines() == [
        "run '/bin/sleep': still running after 0.1 s, killed",
        "wait for nothing: still running after 0.1 s, killed",
    ]


def test_a_run_that_is_given_up_kills_its_child() -> None:
    out = children_test(
        """
        running = asyncio.create_task(children.run(["/bin/sleep", "1000"]))
        await asyncio.sleep(0.05)
        (child,) = children._running.values()
        running.cancel()
        print(await child.wait())
        """
    )

    assert int(out) == 128 + signal.SIGKILL


def test_a_missing_program_is_named_and_leaves_no_fd() -> None:
    out = children_test(
        """
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            try:
                await children.run(["/bin/no-such-program"])
            except Internal as error:
                print(error)
        print(len(os.listdir("/proc/self/fd")) - before)
        """
    )

    assert out.count("run '/bin/no-such-program': ENOENT") == 3
    assert out.endswith("\n0\n")


def test_an_orphan_that_ended_before_it_was_adopted_is_not_lost() -> None:
    out = children_test(
        """
        become_subreaper()
        with children.expecting() as adopt:
            done = await children.run(["/bin/sh", "-c", orphan_of_a_shell("exit 9")])
            while not children._unclaimed:
                await asyncio.sleep(0.01)
            orphan = adopt(int(done.stdout))
            print(await orphan.wait(), orphan.is_running)
        print(children._unclaimed)
        """
    )

    assert out == "9 False\n{}\n"


def test_orphans_without_an_adopter_are_reaped() -> None:
    out = children_test(
        """
        become_subreaper()
        await children.run(["/bin/sh", "-c", "for n in 1 2 3 4 5; do sleep 0.05 & done"])
        await asyncio.sleep(0.3)
        print(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())
        """
    )

    assert out == "[]\n"


def test_under_load_every_exit_code_reaches_its_own_waiters() -> None:
    """Orphans of unknown parents, adopted ones and children end all at once, each with a code of its own."""
    out = children_test(
        """
        become_subreaper()

        async def one(number):
            code = number % 200 + 1
            script = orphan_of_a_shell(f"sleep 0.0{number % 10}; exit {code}")
            with children.expecting() as adopt:
                done = await children.run(["/bin/sh", "-c", f"(exit {code}) & {script}; exit {code}"])
                orphan = adopt(int(done.stdout))
                waited = await asyncio.gather(orphan.wait(), orphan.wait())
            return [done.code, *waited, await orphan.wait()] == [code] * 4

        for _ in range(5):
            found = await asyncio.gather(*(one(number) for number in range(60)))
            assert all(found), found
        while children._running or Path(f"/proc/self/task/{os.getpid()}/children").read_text():
            await asyncio.sleep(0.01)
        print(len(found), children._unclaimed)
        """
    )

    assert out == "60 {}\n"


def test_a_waiter_that_is_given_up_takes_the_exit_from_no_other() -> None:
    out = children_test(
        """
        child = children.spawn(["/bin/sh", "-c", "sleep 0.2; exit 6"])
        given_up, other = asyncio.create_task(child.wait()), asyncio.create_task(child.wait())
        await asyncio.sleep(0.05)
        given_up.cancel()
        codes = []
        child.when_ended(codes.append)
        print(await other, child.code, codes)
        child.when_ended(codes.append)
        child.send_signal(signal.SIGKILL)
        print(codes)
        """
    )

    assert out == "6 6 [6]\n[6, 6]\n"


def test_children_start_with_default_signals_and_only_three_fds() -> None:
    out = children_test(
        """
        fd = os.open("/dev/null", os.O_RDONLY)
        script = "ls /proc/self/fd | wc -l; while read k v; do [ $k = SigIgn: ] && echo $v; done < /proc/self/status"
        print((await children.run(["/bin/sh", "-c", script])).stdout.decode())
        """
    )

    fds, ignored = out.split()
    assert int(fds) == 4  # ls has its directory open too
    assert int(ignored, 16) & (1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1) == 0


def test_programs_are_found_on_the_agents_own_path_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "only-here").write_text("")
    (tmp_path / "only-here").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    assert find_program("only-here") is None
    assert find_program("sh") in ("/usr/bin/sh", "/bin/sh", "/usr/sbin/sh")
