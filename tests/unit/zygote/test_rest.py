"""When a forked shim gives memory back: after calls, once it is quiet, not too often, and alone."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from itertools import pairwise
from typing import Any

import pytest

from pyshim.host.memory.baseline import NotAlone
from pyshim.zygote.rest import AT_MOST_EVERY_S, QUIET_S, Rest
from tests.fakes.clock import run_fast_forward


class FakeBaseline:
    """Notes when it was gone back to, and how many threads there were."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.at_s: list[float] = []
        self.rested = asyncio.Event()
        self.threads: list[int] = []
        self.turned_away = 0
        self._failure = failure

    def give_back(self) -> int:
        self.at_s.append(asyncio.get_running_loop().time())
        self.threads.append(threading.active_count())
        self.rested.set()
        if self._failure is not None:
            raise self._failure
        return 4096

    def turn_away(self) -> None:
        self.turned_away += 1
        if self._failure is not None:
            raise self._failure


def resting(baseline: FakeBaseline, quiet_s: float = QUIET_S) -> Rest:
    return Rest(asyncio.get_running_loop(), baseline, quiet_s=quiet_s)  # type: ignore[arg-type]


def scenario(test: Callable[[Rest, FakeBaseline], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Runs `test` with a shim's rests and what they go back to, idle time skipped."""

    def run() -> None:
        async def body() -> None:
            baseline = FakeBaseline()
            await test(resting(baseline), baseline)

        run_fast_forward(body())

    run.__name__ = test.__name__
    return run


@scenario
async def test_a_shim_that_was_never_called_does_not_rest(rest: Rest, baseline: FakeBaseline) -> None:
    await asyncio.sleep(1000)

    assert baseline.at_s == []


@scenario
async def test_calls_are_followed_by_one_rest_once_it_is_quiet(rest: Rest, baseline: FakeBaseline) -> None:
    loop = asyncio.get_running_loop()
    for _ in range(3):
        await asyncio.sleep(QUIET_S * 0.9)
        rest.called()
    last_s = loop.time()

    await asyncio.sleep(1000)

    (at_s,) = baseline.at_s
    assert QUIET_S <= at_s - last_s < QUIET_S + 2
    assert baseline.turned_away == 1


@scenario
async def test_rests_keep_their_distance(rest: Rest, baseline: FakeBaseline) -> None:
    for _ in range(40):
        rest.called()
        await asyncio.sleep(2 * QUIET_S)
    await asyncio.sleep(1000)

    distances = [after - before for before, after in zip(baseline.at_s, baseline.at_s[1:], strict=False)]
    assert len(distances) == pytest.approx(40 * 2 * QUIET_S / AT_MOST_EVERY_S, abs=2)
    assert min(distances) >= AT_MOST_EVERY_S


def test_threads_that_wait_for_work_have_ended_before_and_work_has_new_ones_afterwards() -> None:
    async def body() -> None:
        before = threading.active_count()
        baseline = FakeBaseline()
        rest = resting(baseline, quiet_s=0)
        assert await asyncio.gather(*(asyncio.to_thread(int, text) for text in "123")) == [1, 2, 3]
        assert threading.active_count() > before

        rest.called()
        await baseline.rested.wait()

        assert baseline.threads == [before]
        assert await asyncio.to_thread(int, "4") == 4

    asyncio.run(asyncio.wait_for(body(), 120))


def test_work_under_way_in_a_thread_is_finished() -> None:
    async def body() -> None:
        baseline = FakeBaseline(NotAlone("2 threads"))
        rest = resting(baseline, quiet_s=0)
        go_on = threading.Event()
        under_way = asyncio.create_task(asyncio.to_thread(go_on.wait))
        await asyncio.sleep(0)

        rest.called()
        await baseline.rested.wait()
        go_on.set()

        assert await under_way

    asyncio.run(asyncio.wait_for(body(), 120))


@pytest.mark.parametrize(("failure", "tries"), [(NotAlone("2 threads"), 3), (PermissionError("no code of our own"), 1)])
def test_a_rest_that_fails_is_tried_again_after_the_next_call(failure: Exception, tries: int) -> None:
    """And before it a few times, where all that was wrong may be that threads had not ended yet."""

    async def body() -> None:
        baseline = FakeBaseline(failure)
        rest = resting(baseline)
        for _ in range(2):
            rest.called()
            await asyncio.sleep(1000)

        assert len(baseline.at_s) == 2 * tries
        assert all(later - sooner >= QUIET_S for sooner, later in pairwise(baseline.at_s))

    run_fast_forward(body())


@scenario
async def test_a_call_during_a_rest_is_followed_by_another(rest: Rest, baseline: FakeBaseline) -> None:
    rest.called()
    await baseline.rested.wait()
    rest.called()  # before what follows has been done

    await asyncio.sleep(1000)

    assert (len(baseline.at_s), baseline.turned_away) == (2, 2)


@pytest.mark.parametrize("called_before", [True, False])
def test_nobody_rests_after_the_end(called_before: bool) -> None:
    @scenario
    async def body(rest: Rest, baseline: FakeBaseline) -> None:
        if called_before:
            rest.called()
        rest.close()
        rest.called()

        await asyncio.sleep(1000)

        assert baseline.at_s == []

    body()
