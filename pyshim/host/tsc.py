"""The rate of the host's time stamp counter, which is also that of an emulated CPU: QEMU hands it through.

Measured, since nothing in /proc or /sys has it: `cpu MHz` is what the CPU runs at now. Two readings of counter and
clock together are enough, a few milliseconds apart.
"""

import asyncio
import ctypes
import time
from collections.abc import Callable
from typing import NamedTuple

from pyshim.host.machine_code import executable

_RDTSC = bytes.fromhex(
    "0faee8"  # lfence: not before what stands before it
    "0f31"  # rdtsc
    "48c1e220"  # shl rdx, 32
    "4809d0"  # or rax, rdx
    "c3"  # ret
)
LEAST_NS = 5_000_000
"""Between two readings, each of which is right to a microsecond or two: the rate is then right to 0.1 percent."""
_TRIES = 20
_SANE_KHZ = range(100_000, 10_000_001)


class Reading(NamedTuple):
    ticks: int
    at_ns: int


def reading(clock_ns: Callable[[], int] = time.monotonic_ns) -> Reading:
    """Counter and clock at one moment: of several looks the one that was interrupted least. Raises OSError."""
    with executable(_RDTSC, ctypes.c_uint64) as rdtsc:
        looks = []
        for _ in range(_TRIES):
            before_ns = clock_ns()
            ticks = rdtsc()
            looks.append((clock_ns() - before_ns, before_ns, ticks))
    took_ns, before_ns, ticks = min(looks)
    return Reading(ticks, before_ns + took_ns // 2)


async def khz_since(first: Reading) -> int:
    """Ticks in a millisecond; 0 when they make no sense. Waits for what is missing of `LEAST_NS`. Raises OSError."""
    missing_ns = first.at_ns + LEAST_NS - time.monotonic_ns()
    if missing_ns > 0:
        await asyncio.sleep(missing_ns / 1e9)
    return khz_between(first, reading())


def khz_between(first: Reading, second: Reading) -> int:
    khz = round((second.ticks - first.ticks) * 1_000_000 / max(1, second.at_ns - first.at_ns))
    return khz if khz in _SANE_KHZ else 0
