"""A pod's life beside a peer that lies, on the fake machine, and what must hold whatever the peer does.

State answers at any time, memory is bounded, a KILL of the sandbox ends the pod, and the host is clean.
"""

import asyncio
import gc
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pyshim.model.errors import ShimError
from pyshim.model.units import MIB
from tests.fakes.clock import run_fast_forward
from tests.unit.failpoints.pod_life import APP, POD, SIDE, PodLife

MEMORY_BYTES = 64 * MIB
"""Bytes that a peer may make the shim hold: some messages and their cut pieces."""
LIFE_S = 3600.0
"""Virtual seconds for a whole life: each of its calls may take the limit of several."""


LONGEST_MIB_OF_JSON = 30
"""Longest callback on the loop, as a multiple of the CPU time to read a JSON array of 1 MiB here."""


@contextmanager
def callbacks_are_short() -> Iterator[None]:
    """No callback of an event loop takes long. CPU time is compared with other work of this run: machines differ."""
    longest_s, original = 0.0, asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        nonlocal longest_s
        began = time.thread_time()
        original(handle)
        longest_s = max(longest_s, time.thread_time() - began)

    asyncio.Handle._run = timed  # type: ignore[method-assign]
    gc.collect()
    gc.freeze()  # a callback's collections must not walk the objects of all tests before this one
    try:
        yield
    finally:
        gc.unfreeze()
        asyncio.Handle._run = original  # type: ignore[method-assign]
    zeros = b"[" + b"0," * (1 << 19) + b"0]"
    began = time.thread_time()
    json.loads(zeros)
    assert longest_s < LONGEST_MIB_OF_JSON * (time.thread_time() - began)


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


async def _look(life: PodLife) -> None:
    """State is asked all the time, as containerd does before every call."""
    while True:
        for container in (POD, APP, SIDE):
            try:
                life.pod.state(container, None)
            except ShimError:
                continue
        await asyncio.sleep(1)


def assert_survived(make: Callable[[], PodLife], spoil: Callable[[PodLife], None], *, from_the_start: bool) -> None:
    """The life that `make` begins went on, from its start or once the pod runs, with the peer spoilt by `spoil`."""

    async def body() -> None:
        before, held = asyncio.all_tasks(), resident_bytes()
        life = make()
        looking = asyncio.ensure_future(_look(life))
        if from_the_start:
            spoil(life)
        else:
            await life.start()
            await life.make_app()
            spoil(life)
        await life.live_on()

        assert not looking.done()
        looking.cancel()
        life.errors.clear()
        await life.end()

        assert f"no exit of {POD} came" not in life.errors, "a container may be busy; its sandbox ends"
        assert life.machine.left() == []
        await life.close()
        await asyncio.gather(looking, return_exceptions=True)
        assert not [task.get_name() for task in asyncio.all_tasks() - before]
        assert resident_bytes() - held < MEMORY_BYTES

    async def bounded() -> None:
        async with asyncio.timeout(LIFE_S):
            await body()

    with callbacks_are_short():
        run_fast_forward(bounded())
