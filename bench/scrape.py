"""The cost of a scrape of a node: `pyshim monitor` over idle pods on the stand-ins of `stubs.py`.

`python -m integration.framework.enclosure python -m bench.scrape`, as root, prints it.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import NamedTuple

from bench import stub_pods, stub_whole_pods, stubs
from bench.ground import GROUND, containerd_up
from bench.measures import Ground, cpu_s
from integration.framework.waiting import eventually

_SCRAPES = 20
_IDLE_S = 30.0
_ANSWER_S = 60.0


class Cost(NamedTuple):
    """CPU time of one scrape, for each pod."""

    monitor_ms: float
    shim_ms: float
    kib: float
    """Of the answer."""

    def __str__(self) -> str:
        return f"{self.monitor_ms:.1f} ms in the monitor and {self.shim_ms:.1f} ms in the shim, {self.kib:.0f} KiB"


def cost(ground: Ground, shims: Sequence[int]) -> Cost:
    """The mean of some scrapes of the pods of `shims`, after a first one, for which each program loads its modules."""
    with _monitor(ground) as (monitor, url):
        answer = _get(url)
        if answer.count(b"\npyshim_containers{") != len(shims):
            raise AssertionError(f"scrape {len(shims)} pods: {answer.count(b'pyshim_containers{')} answered")
        before = cpu_s(monitor), sum(map(cpu_s, shims))
        for _ in range(_SCRAPES):
            answer = _get(url)
        ms = 1000 / _SCRAPES / len(shims)
        return Cost(
            monitor_ms=(cpu_s(monitor) - before[0]) * ms,
            shim_ms=(sum(map(cpu_s, shims)) - before[1]) * ms,
            kib=len(answer) / 1024 / len(shims),
        )


@contextmanager
def _monitor(ground: Ground) -> Iterator[tuple[int, str]]:
    """Pid and URL of a node's endpoint that runs meanwhile."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    argv = [str(ground.binaries / "pyshim"), "monitor", "--listen-address", address]
    with open(ground.directory / "monitor.log", "wb") as log:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        eventually(lambda: _answers(f"http://{address}/sandboxes"), what="the monitor answers", within_s=_ANSWER_S)
        yield process.pid, f"http://{address}/metrics"
    finally:
        process.terminate()
        process.wait()


def _answers(url: str) -> bool:
    try:
        return bool(_get(url))
    except urllib.error.URLError:
        return False


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=_ANSWER_S) as reply:
        body: bytes = reply.read()
    return body


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.scrape", description="What a scrape of many pods costs.")
    parser.add_argument("--pods", type=int, default=20, help="default 20")
    parser.add_argument("--forked", action="store_true", help="of shims that are forked, not executed")
    asked = parser.parse_args()
    with (
        containerd_up() as ground,
        ground.zygote() if asked.forked else nullcontext(),
        stub_whole_pods.running(replace(ground, config=stubs.config(GROUND)), asked.pods) as pids,
    ):
        time.sleep(1)
        idle = [stub_pods.wakeups(pids[0], _IDLE_S)]
        found = cost(ground, pids)
        stub_pods.wait_until_idle(pids[0])
        idle.append(stub_pods.wakeups(pids[0], _IDLE_S))
    print(f"a scrape of {asked.pods} pods, CPU time for each: {found}")
    print(f"wake-ups of an idle shim in {_IDLE_S:g} s: {idle[0]} before it, {idle[1]} after it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
