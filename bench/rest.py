"""`python -m bench.rest`, inside an enclosure: what pods cost while nobody uses them, and at a container's end.

`make peers WHAT=rest` runs it on the newest containerd, which asks every container's statistics once a second unless
`stats_collect_period` says otherwise. The pods of a column, each with three containers that sleep, are at rest with and
without that; then containers end, and the statistics of all pods are asked for while one guest says nothing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from statistics import median
from typing import NamedTuple

from bench.ground import PROJECT
from integration.framework import enclosure, processes, releases
from integration.framework.cri import HANDLER, Container, Cri, Pod
from integration.framework.cri_session import GROUND, RUNC_HANDLER, STAND_IN_HANDLER, cri_daemon
from integration.framework.pod_overhead import cpu_s
from integration.framework.processes import Process
from integration.framework.runtime import Runtime

TARGET = PROJECT / "bench" / "results" / "rest.md"
_OFF = '  stats_collect_period = "1000h"\n'
_SETTLE_S = 15.0
_REST_S = 20.0
_CONTAINERS = 3
Samples = dict[tuple[str, str], list[float]]
"""Milliseconds, or millicores for each pod, by row and column."""


class Column(NamedTuple):
    title: str
    handler: str
    shim: Runtime
    pods: int


COLUMNS = (
    Column("pyshim, a VM", HANDLER, Runtime.chosen(), 1),
    Column("pyshim, 20 stand-ins", STAND_IN_HANDLER, Runtime.chosen(), 20),
    Column("runc, 20 pods", RUNC_HANDLER, Runtime(name="io.containerd.runc.v2"), 20),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.rest", description="What pods cost at rest and at their end."
    )
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="rounds; default: 5")
    runs = parser.parse_args().runs
    if enclosure.MARK not in os.environ:
        print("bench.rest: runs inside an enclosure (hint: `make peers WHAT=rest`)", file=sys.stderr)
        return 2
    samples: Samples = defaultdict(list)
    load_before = os.getloadavg()[0]
    for number in range(1, runs + 1):
        print(f"round {number} of {runs}", flush=True)
        for asks in (True, False) if number % 2 else (False, True):
            with _containerd("" if asks else _OFF) as cri:
                for column in COLUMNS:
                    _measure(cri, column, samples, asks=asks)
    text = _as_markdown(samples, runs, load_before)
    TARGET.write_text(text)
    print(text)
    return 0


@contextmanager
def _containerd(settings: str) -> Iterator[Cri]:
    GROUND.mkdir(parents=True, exist_ok=True)
    with cri_daemon(PROJECT / "bin", settings=settings, log_level="info") as cri:
        yield cri
    shutil.rmtree(GROUND)


def _measure(cri: Cri, column: Column, samples: Samples, *, asks: bool) -> None:
    with ExitStack() as end:
        pods = [end.enter_context(cri.pod(handler=column.handler)) for _ in range(column.pods)]
        for pod in pods:
            for _ in range(_CONTAINERS):
                pod.start()
        time.sleep(_SETTLE_S)
        asked = "asked every second" if asks else "not asked"
        for program, millicores in _at_rest(cri, column, pods).items():
            samples[f"{program}, {asked}, millicores", column.title].append(millicores)
        if not asks:
            return
        for container in pods[0].containers:
            samples["StopContainer (SIGKILL) and RemoveContainer, ms", column.title].append(
                _ms(partial(_end, container))
            )
        pods[0].containers.clear()
        if column.handler == STAND_IN_HANDLER:
            _ask_with_one_hung(cri, column, pods[-1], samples)


def _at_rest(cri: Cri, column: Column, pods: list[Pod]) -> dict[str, float]:
    """CPU time of each kind of process, in thousandths of a core for each pod."""
    kinds = {
        "VMM": [vmm.pid for pod in pods for vmm in _vmms(pod)],
        "shim": [each.pid for pod in pods for each in column.shim.shims(pod.id)],
        "containerd": [cri.daemon.pid],
    }
    began_s, before = time.monotonic(), {kind: sum(map(cpu_s, pids)) for kind, pids in kinds.items()}
    time.sleep(_REST_S)
    rested_s = time.monotonic() - began_s
    used_s = {kind: sum(map(cpu_s, pids)) - before[kind] for kind, pids in kinds.items() if pids}
    return {kind: 1000 * cpu / rested_s / len(pods) for kind, cpu in used_s.items()}


def _vmms(pod: Pod) -> list[Process]:
    """QEMU, or the stand-in, which an interpreter runs."""
    return processes.find("-name", f"sandbox-{pod.id}")


def _ask_with_one_hung(cri: Cri, column: Column, hung: Pod, samples: Samples) -> None:
    """All pods' statistics, three times; the second and third time it is known that one guest does not answer."""
    (vmm,) = _vmms(hung)
    os.kill(vmm.pid, signal.SIGSTOP)
    try:
        for time_of in ("first", "second", "third"):
            row = f"ListContainerStats, one of 20 guests hung, {time_of} time, ms"
            samples[row, column.title].append(_ms(lambda: cri.call("ListContainerStats")))
            time.sleep(1.5)  # older than a sample that answers every caller
    finally:
        os.kill(vmm.pid, signal.SIGCONT)


def _end(container: Container) -> None:
    container.stop(timeout=0)
    container.remove()


def _ms(call: Callable[[], object]) -> float:
    began_s = time.monotonic()
    call()
    return (time.monotonic() - began_s) * 1000


def _as_markdown(samples: Samples, runs: int, load_before: float) -> str:
    titles = [column.title for column in COLUMNS]
    lines = [
        "# Pods at rest, and a container's end",
        "",
        "Made by `make peers WHAT=rest`; see [bench](../rest.py). Medians (least .. most).",
        "",
        f"- containerd: {releases.chosen().version or releases.chosen().generation}",
        f"- {runs} rounds; {_CONTAINERS} containers in each pod; millicores are thousandths of a core, for one pod",
        f"- load average before: {load_before:.1f}",
        "",
        f"| what | {' | '.join(titles)} |",
        "|---|" + "---:|" * len(titles),
    ]
    for row in dict.fromkeys(row for row, _ in samples):
        cells = [_cell(samples.get((row, title))) for title in titles]
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(values: list[float] | None) -> str:
    return f"{median(values):.1f} ({min(values):.1f} .. {max(values):.1f})" if values else ""


if __name__ == "__main__":
    sys.exit(main())
