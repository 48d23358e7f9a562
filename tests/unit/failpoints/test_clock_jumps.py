"""The time of day is set while a pod lives: it dates what happened, and nothing waits by it."""

import itertools

import pytest

from pyshim.model.task import TaskExited
from pyshim.node.cli.trace import as_otlp, as_text
from tests.unit.failpoints.pod_life import PodLife

_NOW_NS = 1_700_000_000_000_000_000
_DAY_NS = 86_400 * 10**9


@pytest.mark.parametrize("jumps", [(-_DAY_NS,), (_DAY_NS,), (_DAY_NS, -3 * _DAY_NS)], ids=["back", "ahead", "both"])
async def test_a_clock_that_jumps_at_every_look_disturbs_no_pod(jumps: tuple[int, ...], fast_clock: None) -> None:
    times = itertools.accumulate(itertools.cycle(jumps), initial=_NOW_NS)
    life = PodLife(clock_ns=lambda: next(times))
    await life.live()
    spans = life.pod._trace.spans
    await life.clean_up()
    await life.close()

    assert life.errors == []
    assert life.machine.left() == []
    exits = [event.exit for event in life.publisher.events if isinstance(event, TaskExited)]
    assert exits
    assert all(one.exited_at_ns > 0 for one in exits)
    recorded = tuple(spans)
    assert as_text(recorded)
    assert as_otlp("pod", recorded)
