import asyncio
import logging
import os
import signal
import subprocess

import pytest

from pyshim.debug import MAX_TEXT_CHARS, children, dump_on_signal, objects, stacks, waiting_at


async def inner(event: asyncio.Event) -> None:
    await event.wait()


async def outer(event: asyncio.Event) -> None:
    await inner(event)


def test_signal_writes_tasks_requests_children_and_fds_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(b"x")
    child.stdin.flush()
    assert child.stdout.read(1) == b"x"  # Popen may return before the kernel has named the process after its program

    async def main() -> None:
        event = asyncio.Event()
        task = asyncio.create_task(outer(event), name="wait/c1")
        loop = asyncio.get_running_loop()
        asked = asyncio.Event()

        def open_requests() -> list[str]:
            asked.set()
            return ["Wait c1 - for 1.0 s"]

        dump_on_signal(loop, open_requests)
        os.kill(os.getpid(), signal.SIGUSR1)
        await asked.wait()
        event.set()
        await task
        loop.remove_signal_handler(signal.SIGUSR1)

    with caplog.at_level(logging.INFO, logger="pyshim.debug"):
        asyncio.run(main())
    child.kill()
    child.communicate()

    lines = [str(vars(record)["line"]) for record in caplog.records if record.message == "dump"]
    (task,) = (line for line in lines if line.startswith("task wait/c1: "))
    assert "outer (test_debug.py:" in task
    assert "> inner (test_debug.py:" in task
    assert "request Wait c1 - for 1.0 s" in lines
    assert f"child {child.pid} cat" in lines
    assert any(line.startswith("fds ") for line in lines)


async def test_a_text_has_tasks_requests_and_threads_and_an_end() -> None:
    event = asyncio.Event()
    task = asyncio.create_task(outer(event), name="wait/c1")
    await asyncio.sleep(0)
    text = stacks(["Wait c1 - for 1.0 s", "x" * MAX_TEXT_CHARS])
    event.set()
    await task

    assert "task wait/c1: outer (test_debug.py:" in text
    assert "request Wait c1 - for 1.0 s\n" in text
    assert len(text) == MAX_TEXT_CHARS + 1
    assert "thread MainThread:\n" in stacks([])


def test_objects_are_counted_by_type() -> None:
    kept = [_Mine() for _ in range(5000)]

    assert f"{len(kept)} {__name__}._Mine\n" in objects()


class _Mine:
    def __init__(self) -> None:
        self.others: list[object] = []


async def test_finished_task_waits_nowhere() -> None:
    task = asyncio.create_task(asyncio.sleep(0))
    await task

    assert waiting_at(task) == []


def test_there_may_be_no_children() -> None:
    assert all(pid > 0 for pid, _ in children())
