"""Owned tasks, work that must reach its end, and undoing in order."""

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import pytest

from pyshim.concurrency.tasks import TaskOwner, joined, to_the_end, together
from pyshim.concurrency.undo import Undo
from pyshim.model.errors import Cancelled, FailedPrecondition

pytestmark = pytest.mark.usefixtures("fast_clock")


async def test_work_that_must_reach_its_end_survives_two_cancellations() -> None:
    done: list[str] = []

    async def work() -> str:
        await asyncio.sleep(5)
        done.append("all of it")
        return "result"

    waiting = asyncio.ensure_future(to_the_end(work()))
    for _ in range(2):
        await asyncio.sleep(1)
        waiting.cancel()

    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert done == ["all of it"]
    assert await to_the_end(work()) == "result"


async def test_work_done_together_runs_at_the_same_time() -> None:
    loop = asyncio.get_running_loop()
    started = loop.time()

    await together(asyncio.sleep(5), asyncio.sleep(3), asyncio.sleep(4))

    assert loop.time() - started < 6  # of the clock that is wound forward


@pytest.mark.parametrize("by", ["failure", "cancellation of the caller", "cancellation of a part"])
async def test_when_work_done_together_fails_all_of_it_has_ended(by: str) -> None:
    left: list[str] = []

    async def slow_to_go() -> None:
        try:
            await asyncio.sleep(100)
        finally:
            await asyncio.sleep(2)
            left.append("gone")

    async def ends_early() -> None:
        if by == "cancellation of the caller":
            await asyncio.sleep(100)
        await asyncio.sleep(1)
        raise FailedPrecondition("no") if by == "failure" else asyncio.CancelledError

    started = asyncio.get_running_loop().time()
    waiting = asyncio.ensure_future(together(slow_to_go(), ends_early()))
    await asyncio.sleep(1.5)
    if by == "cancellation of the caller":
        waiting.cancel()

    with pytest.raises(FailedPrecondition if by == "failure" else asyncio.CancelledError):
        await waiting
    assert left == ["gone"]
    assert asyncio.get_running_loop().time() - started < 10


async def test_of_several_errors_of_such_work_one_is_the_callers_and_asyncio_reports_none() -> None:
    async def fail(why: str) -> None:
        raise FailedPrecondition(why)

    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: reported.append(context["message"]))

    with pytest.raises(FailedPrecondition, match="one"):
        await together(fail("one"), fail("two"))

    gc.collect()
    assert reported == []


async def test_an_error_of_such_work_is_the_callers() -> None:
    async def work() -> None:
        raise FailedPrecondition("no")

    with pytest.raises(FailedPrecondition, match="no"):
        await to_the_end(work())


async def test_a_caller_that_gives_up_does_not_end_what_it_joined() -> None:
    owner = TaskOwner()
    task = owner.spawn("work", asyncio.sleep(5, "result"))
    first, second = (asyncio.ensure_future(joined(task, "do it")) for _ in range(2))
    await asyncio.sleep(1)

    first.cancel()

    with pytest.raises(asyncio.CancelledError):
        await first
    assert await second == "result"


async def test_joined_work_that_is_ended_is_an_error_for_everybody_who_waits() -> None:
    owner = TaskOwner()
    task = owner.spawn("work", asyncio.sleep(5))
    waiting = asyncio.ensure_future(joined(task, "do it"))
    await asyncio.sleep(1)

    await owner.close()

    with pytest.raises(Cancelled, match="do it"):
        await waiting


async def test_closing_the_owner_from_one_of_its_tasks_ends_the_others() -> None:
    owner = TaskOwner()
    other = owner.spawn("other", asyncio.sleep(3600))

    await owner.spawn("closer", owner.close())

    assert other.cancelled()


async def test_a_failing_background_task_is_logged_with_its_name(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        raise ValueError("a bug")

    TaskOwner().supervise("watch/c1", work())
    await asyncio.sleep(0.01)

    assert [getattr(record, "task", "") for record in caplog.records if record.name.startswith("pyshim")] == [
        "watch/c1"
    ]
    assert "a bug" in caplog.text


def _step(log: list[str], name: str, failures: list[Exception]) -> Callable[[], Any]:
    async def step() -> None:
        log.append(name)
        if failures:
            raise failures.pop()

    return step


async def test_undo_goes_backwards_tries_everything_and_keeps_what_failed() -> None:
    log: list[str] = []
    undo = Undo("test")
    undo.push(_step(log, "first", []))
    undo.push(_step(log, "second", [ValueError("a bug")]))
    undo.push(_step(log, "third", [FailedPrecondition("busy")]))

    error = await undo.run()

    assert isinstance(error, FailedPrecondition)
    assert log == ["third", "second", "first"]
    assert await undo.run() is None
    assert log[3:] == ["third", "second"]
    assert await undo.run() is None
    assert len(log) == 5
