"""Pods created and removed in rounds, with the memory of their shims.

`python -m integration.framework.enclosure .venv/bin/python -m integration.framework.cri_soak PODS CONTAINERS ROUNDS`
runs any size and prints a table; the tests run a small one.
"""

from __future__ import annotations

import re
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from .cri import Cri
from .leaks import HostState, assert_nothing_left
from .runtime import Runtime

# Two shims that did the same differ by this much: page-granular allocation, and what was imported when.
NOISE_KIB = 768


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    pods: int
    containers: int
    took_s: float
    shim_kib: tuple[int, ...]
    """Private memory of each pod's shim, all its containers running."""

    def __str__(self) -> str:
        median, most = statistics.median(self.shim_kib), max(self.shim_kib)
        size = f"{self.pods} pods x {self.containers} containers"
        return f"{size}: {self.took_s:.1f} s, private memory of a shim: median {median:.0f} KiB, most {most} KiB"


def private_kib(pid: int) -> int:
    """Memory that is this process's alone: what one more of it costs."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(size) for size in re.findall(r"(?m)^Private_(?:Clean|Dirty):\s+(\d+) kB", text))


def one_round(cri: Cri, runtime: Runtime, *, pods: int, containers: int) -> Round:
    """`pods` pods up together, each with `containers` containers, then all removed."""
    started = time.monotonic()
    running = []
    try:
        for number in range(pods):
            pod = cri.run_pod(f"soak{number}")
            running.append(pod)
            for _ in range(containers):
                pod.start()
        for pod in running:
            assert all(container.is_running for container in pod.containers)
        shims = [runtime.shims(pod.id)[0].pid for pod in running]
        memory = tuple(private_kib(pid) for pid in shims)
    finally:
        for pod in running:
            pod.remove()
    return Round(pods=pods, containers=containers, took_s=time.monotonic() - started, shim_kib=memory)


def assert_flat(rounds: list[Round]) -> None:
    """No round's shims are bigger than the first's, nor is within a round the last pod's bigger than the first's."""
    first = statistics.median(rounds[0].shim_kib)
    for number, later in enumerate(rounds, 1):
        assert statistics.median(later.shim_kib) <= first + NOISE_KIB, f"round {number} grew: {rounds}"
        assert later.shim_kib[-1] <= later.shim_kib[0] + NOISE_KIB, f"round {number}'s later pods grew: {rounds}"


def main() -> int:
    from .cri_session import PROJECT, cri_daemon

    pods, containers, count = map(int, sys.argv[1:])
    Path("/run/pyshim-integration").mkdir(exist_ok=True)
    with cri_daemon(PROJECT / "bin") as cri:
        with cri.pod() as warm_up:  # containerd's own furniture is there from the first pod on
            warm_up.start()
        before = HostState.look((Path("/run/pyshim-integration"),))
        rounds = []
        for _ in range(count):
            rounds.append(one_round(cri, Runtime.chosen(), pods=pods, containers=containers))
            print(rounds[-1], flush=True)
            assert_nothing_left(before, (Path("/run/pyshim-integration"),))
            print("nothing left", flush=True)
        assert_flat(rounds)
    print("flat")
    return 0


if __name__ == "__main__":
    sys.exit(main())
