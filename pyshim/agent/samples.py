"""Statistics of containers for many callers: the guest is asked at most twice a second, and never twice at once.

Since 2.3 containerd asks for every container each second, and node agents ask beside it. An answer costs the guest CPU
time, and a hung guest must not hold up a caller that asks for all pods one after the other:

- A sample up to FRESH_S old answers every caller. containerd asks each second and takes the difference of two answers,
  divided by its own clock, for the use of CPU: a sample a second old would answer twice, and that use would be nothing
  in one second and the double in the next.
- The sample of a container that rests, whose numbers were those of the sample before, answers for REST_S: its use is
  nothing either way. Work that begins is told a second later at most.
- A caller waits ANSWER_S for a new one, or less where the question is older than that.
- While a question stays unanswered no other one is asked. The last sample answers for STALE_S; after that callers get
  an error at once.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from pyshim.concurrency.tasks import TaskOwner
from pyshim.model.errors import AgentGone, DeadlineExceeded
from pyshim.model.guest import ContainerStats

log = logging.getLogger(__name__)

FRESH_S = 0.5
REST_S = 1.0
ANSWER_S = 2.0
STALE_S = 30.0


class _Sample(NamedTuple):
    stats: ContainerStats
    at_s: float
    fresh_s: float
    """Seconds for which it answers."""


class _Question(NamedTuple):
    container_id: str
    since_s: float
    task: asyncio.Task[None]


class StatsSamples:
    """The samples of one guest. Times are the loop's."""

    def __init__(self, ask: Callable[[str], Awaitable[Mapping[str, ContainerStats]]]) -> None:
        """`ask` has a time limit and returns the statistics of the container with the id, and any others it gets."""
        self._ask = ask
        self._tasks = TaskOwner()
        self._samples: dict[str, _Sample | None] = {}
        """By container; None for one that was asked for and not answered yet."""
        self._question: _Question | None = None

    async def of(self, container_id: str) -> ContainerStats:
        """The container's statistics, at most REST_S old if the guest answers in time.

        Raises what `ask` raises, and DeadlineExceeded without a sample.
        """
        now = asyncio.get_running_loop().time
        self._samples.setdefault(container_id, None)
        while (sample := self._samples.get(container_id)) is None or now() - sample.at_s > sample.fresh_s:
            question = self._question or self._begin(container_id, now())
            left_s = question.since_s + ANSWER_S - now()
            if left_s > 0:
                await asyncio.wait({question.task}, timeout=left_s)
            if not question.task.done():
                return self._late(container_id, question, now())
            if question.task.cancelled():
                raise AgentGone(f"measure container '{container_id}' in guest: the connection is closed")
            if question.container_id == container_id:
                question.task.result()
        return sample.stats

    def forget(self, container_id: str) -> None:
        """The next caller gets a new sample, unless the container is gone."""
        self._samples.pop(container_id, None)

    async def close(self) -> None:
        await self._tasks.close()

    def _begin(self, container_id: str, now_s: float) -> _Question:
        task = self._tasks.spawn(f"stats/{container_id}", self._take(container_id))
        self._question = _Question(container_id, now_s, task)
        return self._question

    async def _take(self, container_id: str) -> None:
        try:
            found = await self._ask(container_id)
            now_s = asyncio.get_running_loop().time()
            for known in self._samples.keys() & found.keys():  # a lying guest must not fill the table
                last = self._samples[known]
                rests = last is not None and last.stats == found[known]
                self._samples[known] = _Sample(found[known], now_s, REST_S if rests else FRESH_S)
        finally:
            self._question = None

    def _late(self, container_id: str, question: _Question, now_s: float) -> ContainerStats:
        sample = self._samples.get(container_id)
        if sample is None or now_s - sample.at_s > STALE_S:
            since_s = now_s - question.since_s
            raise DeadlineExceeded(f"measure container '{container_id}' in guest: no answer for {since_s:.0f} s")
        log.debug("old statistics", extra={"container": container_id, "age_s": round(now_s - sample.at_s, 1)})
        return sample.stats
