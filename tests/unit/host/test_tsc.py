"""The rate of the time stamp counter, measured on the real one."""

import asyncio
import os
import re
import time
from pathlib import Path

import pytest

from pyshim.host.tsc import Reading, khz_between, khz_since, reading

pytestmark = pytest.mark.skipif(os.uname().machine != "x86_64", reason="x86-64 alone has this counter")


def test_a_rate_of_some_milliseconds_is_that_of_a_longer_time() -> None:
    """A host whose clock is stepped or slewed by more meanwhile has other troubles."""
    first = reading()
    short = asyncio.run(khz_since(first))
    time.sleep(0.2)
    long = khz_between(first, reading())

    assert short == pytest.approx(long, rel=0.002)


def test_the_rate_is_what_a_virtual_cpu_was_told(tmp_path: Path) -> None:
    """In a VM the kernel shows the rate as its CPU's; on other hosts that is what the CPU runs at now."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    shown = re.search(r"^cpu MHz\s*:\s*([0-9.]+)", text, re.MULTILINE)
    if shown is None or " hypervisor" not in text:
        pytest.skip("this host does not say it")

    assert asyncio.run(khz_since(reading())) == pytest.approx(float(shown[1]) * 1000, rel=0.02)


@pytest.mark.parametrize(
    ("ticks", "ns", "khz"),
    [(2_500_000, 1_000_000, 2_500_000), (0, 1_000_000, 0), (-5, 1_000_000, 0), (10**12, 1_000_000, 0), (9**9, 0, 0)],
    ids=["usual", "stands", "backwards", "too fast", "no time"],
)
def test_a_rate_that_makes_no_sense_is_none(ticks: int, ns: int, khz: int) -> None:
    assert khz_between(Reading(100, 100), Reading(100 + ticks, 100 + ns)) == khz


def test_of_several_looks_the_one_that_took_least_counts() -> None:
    """Whoever is interrupted between clock and counter pairs what does not belong together."""
    times = iter([0, 900, *(number for look in range(1, 20) for number in (look * 1000, look * 1000 + 50 + look))])

    assert reading(lambda: next(times)).at_ns == 1000 + 51 // 2


def test_another_processor_is_an_error_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "uname", lambda: type("Uname", (), {"machine": "aarch64"}))

    with pytest.raises(OSError, match="aarch64"):
        reading()
