"""The guest agent's own event loop, children and streams."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from guest.agent.errors import DeadlineExceeded, FailedPrecondition, Internal
from guest.agent.runtime.children import Children, find_program
from guest.agent.runtime.loop import Cancelled, Lock, Loop, Promise, Task
from guest.agent.runtime.streams import Sink, Source

REPOSITORY = Path(__file__).resolve().parents[4]


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop._epoll.close()


def run(loop: Loop, coro: Coroutine[Promise, None, Any]) -> Any:
    task = loop.spawn("test", coro)
    loop.run_until(lambda: task.result.done)
    if task.result.error is not None:
        raise task.result.error
    return task.result.value


def turns(loop: Loop, count: int = 5) -> None:
    for _ in range(count):
        loop.call_later(0.001, lambda: None)  # a turn waits for the next event: let there be one
        loop.turn()


# -- promises and tasks ----------------------------------------------------------------------------------------------


def test_every_waiter_of_a_promise_gets_its_value_early_and_late(loop: Loop) -> None:
    promise = Promise(loop)

    async def wait() -> Any:
        return await promise

    early = [loop.spawn("w", wait()) for _ in range(2)]
    turns(loop)
    promise.resolve("v")
    promise.resolve("second")
    turns(loop)

    assert [task.result.value for task in early] == ["v", "v"]
    assert run(loop, wait()) == "v"


def test_a_tasks_exception_is_its_results(loop: Loop) -> None:
    async def fail() -> None:
        raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        run(loop, fail())


def test_a_cancelled_task_runs_its_finally_and_ends_cancelled(loop: Loop) -> None:
    seen = []

    async def wait() -> None:
        try:
            await Promise(loop)
        finally:
            seen.append("finally")

    task = loop.spawn("w", wait())
    turns(loop)
    task.cancel()
    turns(loop)

    assert seen == ["finally"]
    assert isinstance(task.result.error, Cancelled)


def test_a_task_cancelled_before_its_first_step_never_runs(loop: Loop) -> None:
    seen = []

    async def work() -> None:
        seen.append("ran")

    task = loop.spawn("w", work())
    task.cancel()
    turns(loop)

    assert seen == []
    assert task.result.done


def test_cancelling_when_the_promise_is_settled_already_resumes_the_task_once(loop: Loop) -> None:
    promise = Promise(loop)
    steps = []

    async def wait() -> None:
        try:
            await promise
            steps.append("value")
            await Promise(loop)
        except Cancelled:
            steps.append("cancelled")
            raise

    task = loop.spawn("w", wait())
    turns(loop)
    promise.resolve()
    task.cancel()
    turns(loop)

    assert steps == ["cancelled"]
    assert task.result.done


def test_a_lock_is_given_in_order_and_passes_over_the_cancelled(loop: Loop) -> None:
    lock, order = Lock(loop), []

    async def hold(name: str, until: Promise) -> None:
        await lock.acquire()
        order.append(name)
        try:
            await until
        finally:
            lock.release()

    promises = [Promise(loop) for _ in range(4)]
    tasks = [loop.spawn(name, hold(name, promise)) for name, promise in zip("abcd", promises, strict=True)]
    turns(loop)
    tasks[1].cancel()
    turns(loop)
    promises[0].resolve()
    turns(loop)
    tasks[2].cancel()
    turns(loop)
    promises[3].resolve()
    turns(loop)

    assert order == ["a", "c", "d"]
    assert tasks[3].result.error is None
    assert not lock._held


def test_a_lock_turn_given_to_a_task_that_is_cancelled_at_that_moment_is_passed_on(loop: Loop) -> None:
    lock, order = Lock(loop), []

    async def hold(name: str) -> None:
        await lock.acquire()
        order.append(name)
        lock.release()

    run(loop, lock.acquire())
    first, second = (loop.spawn(name, hold(name)) for name in "ab")
    turns(loop)
    lock.release()
    first.cancel()
    turns(loop)

    assert order == ["b"]
    assert second.result.done


def test_within_gives_the_result_or_says_what_took_too_long(loop: Loop) -> None:
    async def quick() -> int:
        return 3

    assert run(loop, loop.within(5, quick(), "quick")) == 3
    with pytest.raises(DeadlineExceeded, match="slow thing: timed out"):
        run(loop, loop.within(0.01, loop.sleep(60), "slow thing"))


def test_timers_fire_in_order_of_their_time_and_not_once_cancelled(loop: Loop) -> None:
    fired: list[str] = []
    loop.call_later(0.02, lambda: fired.append("late"))
    loop.call_later(0.01, lambda: fired.append("early"))
    loop.call_later(0.005, lambda: fired.append("never")).cancel()

    loop.run_until(lambda: len(fired) == 2)

    assert fired == ["early", "late"]


def test_a_failing_callback_does_not_stop_the_loop(loop: Loop, capfd: pytest.CaptureFixture[str]) -> None:
    seen: list[int] = []

    def fail() -> None:
        raise RuntimeError("boom")

    loop.soon(fail)
    loop.soon(lambda: seen.append(1))
    turns(loop, 1)

    assert seen == [1]
    assert "boom" in capfd.readouterr().err


def test_idle_work_runs_only_when_nothing_else_is_due_and_ends(loop: Loop) -> None:
    order: list[str] = []
    pieces = ["a", "b"]

    def idle() -> bool:
        order.append(pieces.pop(0))
        return bool(pieces)

    loop.on_idle = idle
    loop.soon(lambda: order.append("ready"))
    loop.call_later(0.01, lambda: order.append("timer"))
    loop.run_until(lambda: "timer" in order)

    assert order == ["ready", "a", "b", "timer"]
    assert loop.on_idle is None


# -- streams ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def pipe(loop: Loop) -> Iterator[tuple[Source, Sink]]:
    read_fd, write_fd = os.pipe()
    source, sink = Source(loop, read_fd), Sink(loop, write_fd)
    yield source, sink
    source.close()
    sink.close()


def test_a_read_waits_for_data_and_ends_empty_for_ever(loop: Loop, pipe: tuple[Source, Sink]) -> None:
    source, sink = pipe
    reading = loop.spawn("r", source.read(10))
    turns(loop)
    assert not reading.result.done

    run(loop, sink.write(b"hello"))
    loop.run_until(lambda: reading.result.done)
    sink.close()

    assert reading.result.value == b"hello"
    assert [run(loop, source.read(10)) for _ in range(2)] == [b"", b""]


def test_a_write_larger_than_the_pipe_waits_for_a_reader_and_keeps_order(loop: Loop, pipe: tuple[Source, Sink]) -> None:
    source, sink = pipe
    first = loop.spawn("w1", sink.write(b"a" * 200_000))
    second = loop.spawn("w2", sink.write(b"b"))
    finishing = loop.spawn("f", sink.finish())
    turns(loop)
    assert not first.result.done

    async def read_all() -> bytes:
        data = b""
        while chunk := await source.read(65536):
            data += chunk
        return data

    assert run(loop, read_all()) == b"a" * 200_000 + b"b"
    assert second.result.done
    assert finishing.result.done


def test_closing_a_source_ends_a_waiting_read(loop: Loop, pipe: tuple[Source, Sink]) -> None:
    source, _sink = pipe
    reading = loop.spawn("r", source.read(10))
    turns(loop)

    source.close()
    loop.run_until(lambda: reading.result.done)

    assert reading.result.value == b""


def test_a_cancelled_read_leaves_the_next_one_its_bytes(loop: Loop, pipe: tuple[Source, Sink]) -> None:
    source, sink = pipe
    given_up = loop.spawn("r", source.read(10))
    turns(loop)
    given_up.cancel()
    turns(loop)

    run(loop, sink.write(b"x"))

    assert run(loop, source.read(10)) == b"x"


def test_after_the_exit_a_silent_stream_ends_although_someone_holds_it_open(
    loop: Loop, pipe: tuple[Source, Sink]
) -> None:
    source, sink = pipe
    run(loop, sink.write(b"last words"))
    source.process_exited()

    assert run(loop, source.read(100)) == b"last words"
    assert run(loop, source.read(100)) == b""


def test_the_exit_ends_a_read_that_was_waiting_before(loop: Loop, pipe: tuple[Source, Sink]) -> None:
    source, _sink = pipe
    reading = loop.spawn("r", source.read(10))
    turns(loop)

    source.process_exited()
    loop.run_until(lambda: reading.result.done)

    assert reading.result.value == b""


def test_a_write_without_a_reader_is_refused(loop: Loop, pipe: tuple[Source, Sink]) -> None:
    source, sink = pipe
    source.close()

    with pytest.raises(FailedPrecondition, match="closed"):
        run(loop, sink.write(b"x"))
    assert sink.closed


def test_closing_a_sink_ends_a_blocked_write(loop: Loop, pipe: tuple[Source, Sink]) -> None:
    _source, sink = pipe
    writing: Task = loop.spawn("w", sink.write(bytes(1 << 20)))
    turns(loop)

    sink.close()
    loop.run_until(lambda: writing.result.done)

    assert isinstance(writing.result.error, FailedPrecondition)


def test_a_terminals_hangup_is_its_end(loop: Loop) -> None:
    master, slave = os.openpty()
    source = Source(loop, master)
    os.write(slave, b"bye")
    os.close(slave)

    assert run(loop, source.read(100)) == b"bye"
    assert run(loop, source.read(100)) == b""


# -- children: in a process of its own, which may reap everything -----------------------------------------------------

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


# -- what a start costs ----------------------------------------------------------------------------------------------

_ALLOWED_AT_FIRST_ANSWER = """
__future__ _collections_abc _heapq _io _operator _signal _socket _sre _stat _struct _abc abc builtins codecs
collections enum errno functools genericpath heapq io itertools keyword marshal operator os os.path posix posixpath
reprlib select site stat struct sys time types zipimport
""".split()


def test_the_first_answer_needs_no_costly_module() -> None:
    script = """
import sys
before = set(sys.modules)
sys.path.insert(0, sys.argv[1])
import guest.agent.main, guest.agent.log, guest.agent.settings, guest.agent.agent, guest.agent.transport
import guest.agent.calls.health
print(*sorted(name for name in set(sys.modules) - before if not name.startswith(("guest", "pyshim"))))
"""
    argv = [sys.executable, "-I", "-S", "-c", script, str(REPOSITORY)]
    loaded = set(subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split())

    foreign = {name for name in loaded if name not in _ALLOWED_AT_FIRST_ANSWER and not name.startswith("_")}
    assert not foreign, f"imported before the first Health.Check: {sorted(foreign)}"


def test_no_module_of_the_agent_loads_what_its_guest_does_not_have() -> None:
    modules = [
        str(path.relative_to(REPOSITORY))[:-3].replace("/", ".")
        for path in (REPOSITORY / "guest/agent").rglob("*.py")
        # cdi.py is loaded for a container that asks for devices by name, and brings the library's imports along.
        # What is in pull/ runs in a child of its own, which ends with the image it pulled.
        if path.name not in ("__init__.py", "__main__.py", "cdi.py") and path.parent.name != "pull"
    ]
    script = f"""
import sys
sys.path.insert(0, sys.argv[1])
for name in {modules!r}:
    __import__(name)
print(*sorted(sys.modules))
"""
    argv = [sys.executable, "-I", "-S", "-c", script, str(REPOSITORY)]
    loaded = set(subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split())

    unwanted = {"asyncio", "logging", "dataclasses", "typing", "re", "json", "subprocess", "socket", "selectors"}
    assert not loaded & (unwanted | {"google.protobuf", "pathlib", "contextlib", "shutil", "tempfile", "threading"})
