"""Where the memory of forked shims goes: by phase of a pod's life and by cause, alone and among many.

With `--ksm` the kernel's merging of equal pages is on meanwhile, as it is on a node with `/sys/kernel/mm/ksm/run` 1.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from bench import pages, stub_whole_pods
from bench.measures import Ground, beside_mib, memory_of
from pyshim.zygote.rest import QUIET_S

KSM = Path("/sys/kernel/mm/ksm")
ALL_PSS = "PSS, the zygote's included"
_SCAN_PAGES = 5000
"""Each 20 ms: what a node does in a minute or two is waited for in seconds."""
SETTLE_S = QUIET_S + 3.0
"""Until an idle shim has given back what it can."""
_MERGED_WITHIN_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """What a shim has at the end of a phase, in MiB, and how much of it the phase made private."""

    name: str
    pss_mib: float
    private_mib: float
    newly_mib: float
    kinds: dict[str, float]
    places: dict[str, float]


@dataclass(slots=True)
class Profile:
    """`zygote_mib` is its PSS before the first fork. `many` has sums over all shims, as means per shim."""

    zygote_mib: float
    phases: list[Phase] = field(default_factory=list)
    many: dict[str, float] = field(default_factory=dict)


def profile(ground: Ground, pods: int, *, ksm: bool) -> Profile:
    """The phases of the first of `pods` pods, and what each costs once all are up and idle."""
    with _merging() if ksm else nullcontext(), ground.zygote() as zygote:
        found = Profile(zygote_mib=memory_of(zygote.pid).pss_mib)
        before: set[int] = set()

        def watch(name: str, pid: int) -> None:
            nonlocal before
            phase, before = _phase(name, pid, zygote.pid, before)
            found.phases.append(phase)

        with stub_whole_pods.running(ground, pods, watch) as pids:
            _settle([zygote.pid, *zygote.waiting(pids), *pids], ksm=ksm)
            watch(f"idle, one of {pods}", pids[0])
            memories = [memory_of(pid) for pid in pids]
            pss = [memory.pss_mib for memory in memories]
            found.many = {
                "shims": len(pids),
                "PSS": sum(pss) / len(pss),
                ALL_PSS: (sum(pss) + beside_mib(zygote, pids)) / len(pss),
                "private": sum(memory.private_mib for memory in memories) / len(pss),
            }
    return found


def _phase(name: str, pid: int, zygote: int, before: set[int]) -> tuple[Phase, set[int]]:
    memory, private = memory_of(pid), pages.private_of(pid, zygote)
    phase = Phase(
        name=name,
        pss_mib=memory.pss_mib,
        private_mib=memory.private_mib,
        newly_mib=len(private.pages - before) * pages.KIB_PER_PAGE / 1024,
        kinds={kind: private.kinds[kind] / 1024 for kind in pages.KINDS},
        places={place: kib / 1024 for place, kib in private.places.most_common()},
    )
    return phase, private.pages


def _settle(pids: list[int], *, ksm: bool) -> None:
    """Everybody is idle; with KSM, another scan of all memory merges next to nothing."""
    time.sleep(SETTLE_S)
    if not ksm:
        return
    until = time.monotonic() + _MERGED_WITHIN_S
    last = float("inf")
    while time.monotonic() < until:
        scans = _ksm("full_scans")
        # A page is merged when it was found unchanged since the scan before.
        while _ksm("full_scans") < scans + 2 and time.monotonic() < until:
            time.sleep(0.1)
        now = sum(memory_of(pid).pss_mib for pid in pids)
        if now > last * 0.99:
            return
        last = now


@contextmanager
def _merging() -> Iterator[None]:
    """The kernel merges, fast; afterwards nothing is merged and all is set as before. Raises OSError without KSM."""
    before = {name: (KSM / name).read_text() for name in ("pages_to_scan", "run")}
    try:
        (KSM / "pages_to_scan").write_text(str(_SCAN_PAGES))
        (KSM / "run").write_text("1")
        yield
    finally:
        if before["run"].strip() == "0":
            (KSM / "run").write_text("2")  # takes apart what was merged
        for name, value in before.items():
            (KSM / name).write_text(value)


def _ksm(name: str) -> int:
    return int((KSM / name).read_text())


def as_text(found: Profile) -> str:
    """Two tables and a line about many."""
    width = max(len(phase.name) for phase in found.phases)
    heads = ("PSS", "private", "newly", *pages.KINDS)
    lines = [f"MiB; the zygote alone: {found.zygote_mib:.1f}", " " * width + "".join(f"{head:>11}" for head in heads)]
    for phase in found.phases:
        values = (phase.pss_mib, phase.private_mib, phase.newly_mib, *phase.kinds.values())
        lines.append(phase.name.ljust(width) + "".join(f"{value:11.2f}" for value in values))
    lines += ["", f"private, {found.phases[-1].name}, by place:"]
    lines += [f"  {place:32}{mib:6.2f}" for place, mib in found.phases[-1].places.items()]
    lines += ["", f"{found.many['shims']:.0f} shims with a pod of two containers each, mean:"]
    lines += [f"  {name:32}{value:6.2f}" for name, value in found.many.items() if name != "shims"]
    return "\n".join(lines)
