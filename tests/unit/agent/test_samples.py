"""Statistics of containers: one question to the guest for all callers, and none while one is unanswered."""

import asyncio
from collections.abc import Coroutine, Iterable, Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from pyshim.agent.client import AgentClient
from pyshim.agent.samples import ANSWER_S, FRESH_S, REST_S, STALE_S, StatsSamples
from pyshim.model.errors import DeadlineExceeded, NotFound
from pyshim.model.guest import NO_STATS, ContainerStats
from tests.fakes.agent import FakeAgent

pytestmark = pytest.mark.usefixtures("fast_clock")


class Guest:
    """Answers at once, unless `speaks` is clear; `tells` are the containers of an answer beside the one asked for."""

    def __init__(self, *tells: str) -> None:
        self.asked: list[str] = []
        self.rests = True
        self.tells = tells
        self.speaks = asyncio.Event()
        self.speaks.set()

    async def ask(self, container_id: str) -> Mapping[str, ContainerStats]:
        self.asked.append(container_id)
        await self.speaks.wait()
        if container_id == "ghost":
            raise NotFound("find container 'ghost'")
        stats = NO_STATS if self.rests else replace(NO_STATS, pids_current=len(self.asked))
        return dict.fromkeys((container_id, *self.tells), stats)


async def all_of(samples: StatsSamples, names: Iterable[str]) -> None:
    await asyncio.gather(*(samples.of(name) for name in names))


async def seconds(work: Coroutine[Any, Any, object]) -> float:
    """How long `work` takes, by the loop's clock; its DeadlineExceeded is dropped."""
    began = asyncio.get_running_loop().time()
    await asyncio.gather(work, return_exceptions=True)
    return asyncio.get_running_loop().time() - began


@pytest.mark.parametrize(
    ("rests", "calls_per_s", "questions"),
    [(False, 1, {5}), (False, 100, {9, 10}), (True, 1, {3}), (True, 100, {5, 6})],
    ids=["busy, as containerd asks", "busy, too often", "at rest, as containerd asks", "at rest, too often"],
)
async def test_a_caller_each_second_gets_new_numbers_each_time_unless_they_rest(
    rests: bool, calls_per_s: int, questions: set[int]
) -> None:
    guest = Guest()
    guest.rests = rests
    samples = StatsSamples(guest.ask)

    for _ in range(5 * calls_per_s):
        await samples.of("a")
        await asyncio.sleep(0.999 / calls_per_s)

    assert len(guest.asked) in questions


async def test_a_sample_answers_all_callers_for_a_while() -> None:
    guest = Guest("a", "b", "c")
    samples = StatsSamples(guest.ask)
    await all_of(samples, "abc" * 3)
    await asyncio.sleep(FRESH_S * 1.1)
    guest.asked.clear()

    await all_of(samples, "abc" * 3)
    await all_of(samples, "abc" * 3)

    assert len(guest.asked) == 1


async def test_an_agent_without_a_call_for_all_is_asked_once_for_each_container() -> None:
    guest = Guest()
    samples = StatsSamples(guest.ask)

    await all_of(samples, "abab")

    assert sorted(guest.asked) == ["a", "b"]


async def test_a_guest_that_does_not_answer_holds_up_one_caller_and_is_not_asked_again() -> None:
    guest = Guest()
    samples = StatsSamples(guest.ask)
    guest.speaks.clear()

    waits = [await seconds(samples.of(name)) for name in "abcabc"]

    assert waits[0] == pytest.approx(ANSWER_S, abs=0.1)
    assert sum(waits[1:]) < 0.1
    assert guest.asked == ["a"]
    with pytest.raises(DeadlineExceeded, match=r"measure container 'b' in guest: no answer for 2 s"):
        await samples.of("b")
    guest.speaks.set()
    await asyncio.sleep(0.1)
    assert await samples.of("b") is NO_STATS
    await samples.close()


async def test_the_last_sample_answers_for_a_while_and_then_no_more() -> None:
    guest = Guest()
    samples = StatsSamples(guest.ask)
    await samples.of("a")
    guest.speaks.clear()
    await asyncio.sleep(FRESH_S * 1.1)

    assert await samples.of("a") is NO_STATS, "after a wait"
    assert await seconds(samples.of("a")) < 0.1
    await asyncio.sleep(STALE_S)
    with pytest.raises(DeadlineExceeded):
        await samples.of("a")
    assert guest.asked == ["a", "a"]
    await samples.close()


async def test_an_error_is_the_askers_alone() -> None:
    guest = Guest()
    samples = StatsSamples(guest.ask)

    ghost, other = await asyncio.gather(samples.of("ghost"), samples.of("a"), return_exceptions=True)

    assert isinstance(ghost, NotFound)
    assert other is NO_STATS


async def test_a_forgotten_container_is_asked_for_again_and_a_lying_guest_fills_no_table() -> None:
    guest = Guest(*(f"invented{number}" for number in range(1000)))
    samples = StatsSamples(guest.ask)
    await samples.of("a")

    samples.forget("a")
    await samples.of("a")

    assert guest.asked == ["a", "a"]
    assert set(samples._samples) == {"a"}


@pytest.mark.parametrize(("remembers", "calls"), [(True, 1), (False, 2)], ids=["our agent", "kata-agent"])
async def test_our_agent_is_asked_for_all_containers_at_once(
    fake: FakeAgent, client: AgentClient, remembers: bool, calls: int
) -> None:
    fake.remembers = remembers
    fake.containers |= {"a": None, "b": None}  # type: ignore[dict-item]
    assert (await client.stats_container("a")).pids_current == 3
    assert (await client.stats_container("b")).pids_current == 3
    await asyncio.sleep(FRESH_S * 1.1)
    before = len([call for call in fake.calls if call.startswith("Stats")])

    await client.stats_container("a")
    await client.stats_container("b")

    assert len([call for call in fake.calls if call.startswith("Stats")]) - before == calls


async def test_numbers_that_change_are_told_and_only_those(fake: FakeAgent, client: AgentClient) -> None:
    fake.containers |= {"a": None, "b": None}  # type: ignore[dict-item]
    told = []
    for pids in (3, 3, 4):
        fake.pids = pids
        await asyncio.sleep(REST_S * 1.1)
        told.append([(await client.stats_container(name)).pids_current for name in "ab"])

    assert told == [[3, 3], [3, 3], [4, 4]]
