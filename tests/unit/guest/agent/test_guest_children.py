"""The guest agent's children, in a process of its own, which may reap everything."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from guest.agent.errors import Internal
from guest.agent.runtime.children import Children, find_program
from guest.agent.runtime.loop import Loop

REPOSITORY = Path(__file__).resolve().parents[4]
_CHILDREN_TEST = """
import os, sys
sys.path.insert(0, sys.argv[1])
from guest.agent.errors import DeadlineExceeded, Internal
from guest.agent.runtime.children import Children
from guest.agent.runtime.loop import Loop

loop = Loop()
children = Children(loop)
children.start()

def run(coro):
    task = loop.spawn("test", coro)
    loop.run_until(lambda: task.result.done)
    if task.result.error is not None:
        raise task.result.error
    return task.result.value

{body}
"""


def children_test(body: str) -> str:
    """What a script with `loop`, `children` and `run` prints."""
    argv = [sys.executable, "-I", "-S", "-c", _CHILDREN_TEST.replace("{body}", body), str(REPOSITORY)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_run_gives_code_output_and_feeds_stdin() -> None:
    out = children_test(
        """
done = run(children.run(["/bin/sh", "-c", "wc -c; echo err >&2; exit 7"], stdin=bytes(300000)))
print(done.code, done.stdout.split(), done.stderr)
"""
    )

    assert out == "7 [b'300000'] b'err\\n'\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM], ids=lambda number: number.name)
def test_death_by_signal_is_128_plus_its_number(number: signal.Signals) -> None:
    out = children_test(f'print(run(children.run(["/bin/sh", "-c", "kill -{int(number)} $$"])).code)')

    assert int(out) == 128 + number


def test_a_child_that_runs_too_long_is_killed_and_named() -> None:
    out = children_test(
        """
try:
    run(children.run(["/bin/sleep", "1000"], timeout_s=0.1))
except DeadlineExceeded as error:
    print(error)
"""
    )

    assert "'/bin/sleep'" in out
    assert "killed" in out


def test_a_missing_program_is_named_and_leaves_no_fd() -> None:
    out = children_test(
        """
before = len(os.listdir("/proc/self/fd"))
for _ in range(3):
    try:
        run(children.run(["/bin/no-such-program"]))
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
from guest.agent.storage.syscalls import become_subreaper
become_subreaper()
children.expect()
done = run(children.run(["/bin/sh", "-c", "/bin/sh -c 'sleep 0.1; exit 9' & echo $!"]))
async def settle():
    await loop.sleep(0.2)
run(settle())
orphan = int(done.stdout)
async def wait():
    return await children.adopt(orphan)
print(run(wait()))
children.expected()
print(children.is_running(orphan), children._unclaimed)
"""
    )

    assert out == "9\nFalse {}\n"


def test_children_start_with_default_signals_and_only_three_fds() -> None:
    out = children_test(
        """
fd = os.open("/dev/null", os.O_RDONLY)
script = "ls /proc/self/fd | wc -l; while read k v; do [ $k = SigIgn: ] && echo $v; done < /proc/self/status"
print(run(children.run(["/bin/sh", "-c", script])).stdout.decode())
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


def test_errors_say_what_was_run() -> None:
    loop = Loop()
    children = Children(loop)
    try:
        with pytest.raises(Internal, match="run '/nowhere'"):
            children.spawn(["/nowhere"])
    finally:
        for fd in (children._null, children._wake_read, children._wake_write):
            os.close(fd)
        loop._epoll.close()


def test_a_child_with_fixed_addresses_leaves_the_next_one_and_the_agent_random_ones() -> None:
    out = children_test(
        """
def persona(**how):
    read_end, write_end = os.pipe()
    run(waited(children.spawn(["/bin/cat", "/proc/self/personality"], stdout=write_end, **how)))
    return os.read(read_end, 100).decode().strip()

async def waited(promise):
    return await promise

print(persona(fixed_addresses=True), persona(), open("/proc/self/personality").read().strip())
try:
    children.spawn(["/no/such/program"], fixed_addresses=True)
except Internal:
    print(open("/proc/self/personality").read().strip())
"""
    )

    assert out == "00040000 00000000 00000000\n00000000\n"
