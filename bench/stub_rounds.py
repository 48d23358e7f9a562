"""`python -m bench.stub_rounds`, inside an enclosure: many rounds of a container in one pod of a whole shim.

The VM is a stand-in, so that hundreds of rounds take a minute. What a round leaves in the shim adds up; what is filled
once does not: the trace (the first 256 spans), the gaps of the C library's heap, the interpreter's table of names.

`--forked`: of a shim that the zygote has forked.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import nullcontext
from dataclasses import replace

from bench import stub_whole_pods
from bench.ground import GROUND, containerd_up
from bench.measures import MIB, memory_of
from integration.framework import stubs

WARM_UP = 200
"""Rounds until what is filled once is full."""
KIB_A_ROUND = 4.0
"""Far below the size of a leaked task, stream or container over hundreds of rounds, above one growth of a table."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.stub_rounds", description="What rounds of a container leave in the shim of one pod."
    )
    parser.add_argument("--rounds", type=int, default=800, help=f"default 800; more than {WARM_UP}")
    parser.add_argument("--forked", action="store_true", help="of a shim that is forked, not executed")
    asked = parser.parse_args()
    count = asked.rounds
    if count <= WARM_UP:
        parser.error(f"--rounds {count}: expected more than {WARM_UP}")
    with (
        containerd_up() as ground,
        ground.zygote() if asked.forked else nullcontext(),
        stub_whole_pods.pod(replace(ground, config=stubs.config(GROUND))) as pod,
    ):
        warm = kib = fds = 0
        for number in range(1, count + 1):
            name = f"{pod.shim.container}-c{number}"
            with pod.container(name):
                pod.exec(name)
            if number % 100 == 0 or number in (WARM_UP, count):
                kib = round(memory_of(pod.pid).private_mib * MIB / 1024)
                print(f"{number:5} rounds: {kib} KiB private", flush=True)
            if number == WARM_UP:
                warm, fds = kib, _fds(pod.pid)
        slope = (kib - warm) / (count - WARM_UP)
        more = _fds(pod.pid) - fds
    print(f"{slope:+.1f} KiB and {more:+} descriptors in {count - WARM_UP} rounds after the first {WARM_UP}")
    return 0 if slope <= KIB_A_ROUND and more <= 0 else 1


def _fds(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


if __name__ == "__main__":
    sys.exit(main())
