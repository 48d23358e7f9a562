"""The guest agent's own event loop: promises, tasks, locks, timers."""

from __future__ import annotations

from typing import Any

import pytest
from agent_loop import run, turns

from guest.agent.errors import DeadlineExceeded
from guest.agent.runtime.loop import Cancelled, Lock, Loop, Promise


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
