"""Many rounds on one pod: what a round opens and remembers, it closes and forgets.

PYSHIM_SOAK_ROUNDS sets how many; `make peers WHAT=soak` asks for 500.
"""

import asyncio
import gc
import logging
import os
import sys
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from pyshim.model.observation import MAX_SPANS, NO_PARENT, Span
from tests.unit.failpoints.pod_life import PodLife

ROUNDS = int(os.environ.get("PYSHIM_SOAK_ROUNDS", "200"))
WARM_UP = 120
"""Until then the interpreter's caches grow: by three to five blocks a round at first, by less than two afterwards."""
BLOCKS_PER_ROUND = 4.0
"""Memory blocks a round may keep on average: what the interpreter caches. A kept task or stream is dozens."""


class Count(NamedTuple):
    fds: int
    tasks: int
    blocks: int
    held: tuple[str, ...]


def count(life: PodLife) -> Count:
    cgroups = life.host.cgroup_tree
    fakes = (life.agent.calls, life.agent.updates, life.agent.onlined, life.publisher.events)
    for remembered in (*fakes, life.host.hooks, cgroups.settings, cgroups.history):
        remembered.clear()
    life.agent.execs.clear()
    gc.collect()
    return Count(
        fds=len(os.listdir("/proc/self/fd")),
        tasks=len(asyncio.all_tasks()),
        blocks=sys.getallocatedblocks(),
        held=tuple(sorted(life.machine.left())),
    )


@pytest.fixture
def unlogged() -> Iterator[None]:
    """pytest keeps every record that is logged."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.slow
@pytest.mark.usefixtures("unlogged")
async def test_rounds_of_a_container_keep_no_descriptor_no_task_and_no_memory(fast_clock: None) -> None:
    life = PodLife()
    await life.start()
    spans = life.pod._trace.spans  # full from the start: it is bounded, and not what this is about
    spans += [Span("filler", NO_PARENT, 0, 0, "")] * (MAX_SPANS - len(spans))
    counts = []
    for number in range(1, ROUNDS + 1):
        await life.one_round()
        await asyncio.sleep(30)  # what goes on behind a Delete has ended
        if number in (WARM_UP, ROUNDS):
            counts.append(count(life))
    warm, last = counts
    slope = (last.blocks - warm.blocks) / (ROUNDS - WARM_UP)
    print(f"\n{ROUNDS} rounds: {last.fds} fds, {last.tasks} tasks, {slope:+.3f} memory blocks a round")

    assert last.held == warm.held
    assert last.fds <= warm.fds
    assert last.tasks <= warm.tasks
    assert slope < BLOCKS_PER_ROUND

    await life.clean_up()
    await life.close()
    assert life.machine.left() == []
