"""When the service says that nothing is asked of it."""

from __future__ import annotations

import asyncio

from service_bench import bench, run

from protos.containerd import task_v2_pb2


def test_it_is_idle_unless_a_call_is_being_served() -> None:
    async def test() -> None:
        async with bench() as b:
            seen: list[bool] = []
            b.sandboxes.when_called = lambda: seen.append(b.service.idle.is_set())
            await b.call("Pause", task_v2_pb2.PauseRequest(id="c1"))

            assert (seen, b.service.idle.is_set()) == ([False], True)

    run(test())


def test_calls_that_only_wait_leave_it_idle() -> None:
    async def test() -> None:
        async with bench() as b:
            wait = asyncio.create_task(b.call("Wait", task_v2_pb2.WaitRequest(id="c1")))
            await b.call("State", task_v2_pb2.StateRequest(id="c1"))  # is behind it on the connection

            assert any(b.service.open_calls())
            assert b.service.idle.is_set()
            b.sandboxes.exited.set()
            await wait

    run(test())


def test_each_answered_call_is_told_of_be_it_a_look_or_a_failure() -> None:
    """A forked shim rests after calls, whatever they were: each has written to its memory."""

    async def body() -> None:
        async with bench() as b:
            told: list[bool] = []
            b.service.after_call = lambda: told.append(b.service.idle.is_set())
            for number, (method, container) in enumerate(
                (("State", "c1"), ("Pause", "c1"), ("State", "no"), ("Pause", "no"))
            ):
                call = b.call if container == "c1" else b.fails
                await call(method, task_v2_pb2.StateRequest(id=container))

                assert told == [True] * (number + 1)

    run(body())
