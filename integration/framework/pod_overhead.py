"""The cost of a pod for the host beside its guest's memory, measured: the figures behind the RuntimeClass's overhead.

`.venv/bin/python -m integration.framework.enclosure .venv/bin/python -m integration.framework.pod_overhead [PODS]`
prints a table: proportional set sizes of QEMU (without the guest's RAM), virtiofsd and the shim, the part of the
guest's RAM that is touched, and CPU time at rest.
"""

from __future__ import annotations

import os
import re
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from .cri import Pod
from .cri_session import PROJECT, cri_daemon
from .processes import cpu_ticks
from .runtime import Runtime

_REST_S = 10.0
_TICKS = os.sysconf("SC_CLK_TCK")


def pss_mib(pid: int) -> tuple[float, float]:
    """(own, guest RAM) of a process. QEMU maps guest RAM from a memfd, whose name the mapping shows."""
    own = ram = 0
    is_ram = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_ram = "/memfd:" in line
        elif line.startswith("Pss:"):
            own, ram = (own, ram + int(line.split()[1])) if is_ram else (own + int(line.split()[1]), ram)
    return own / 1024, ram / 1024


def cpu_s(pid: int) -> float:
    return sum(cpu_ticks(pid)) / _TICKS


def _look(runtime: Runtime, pod: Pod) -> dict[str, float]:
    parts = {"qemu": runtime.vmms(pod.id), "virtiofsd": runtime.virtiofsds(pod.id), "shim": runtime.shims(pod.id)}
    pids = {name: [process.pid for process in found] for name, found in parts.items()}
    everyone = [pid for found in pids.values() for pid in found]
    before = sum(map(cpu_s, everyone))
    time.sleep(_REST_S)
    memory = {name: [pss_mib(pid) for pid in found] for name, found in pids.items()}
    figures = {f"{name} MiB": sum(own for own, _ in found) for name, found in memory.items()}
    figures["host side MiB"] = sum(figures.values())
    # virtiofsd maps the guest's RAM as well: the halves of its pages add up.
    figures["guest RAM touched MiB"] = sum(ram for found in memory.values() for _, ram in found)
    figures["CPU at rest, millicores"] = (sum(map(cpu_s, everyone)) - before) / _REST_S * 1000
    return figures


def measure(pods: int) -> Iterator[tuple[str, dict[str, float]]]:
    runtime = Runtime.chosen()
    with cri_daemon(PROJECT / "bin") as cri:
        for _ in range(pods):
            with cri.pod() as pod:
                time.sleep(_REST_S / 2)
                yield "no container", _look(runtime, pod)
                for _ in range(3):
                    pod.start()
                time.sleep(_REST_S / 2)
                yield "3 containers", _look(runtime, pod)


def main() -> int:
    Path("/run/pyshim-integration").mkdir(exist_ok=True)
    seen: dict[str, list[dict[str, float]]] = {}
    for label, figures in measure(int(sys.argv[1]) if len(sys.argv) > 1 else 3):
        seen.setdefault(label, []).append(figures)
    print("| |", " | ".join(seen), "|")
    for name in next(iter(seen.values()))[0]:
        columns = [[figures[name] for figures in rows] for rows in seen.values()]
        cells = [f"{statistics.median(column):.0f} ({min(column):.0f} .. {max(column):.0f})" for column in columns]
        print("|", " | ".join([name, *cells]), "|")
    return 0


if __name__ == "__main__":
    sys.exit(main())
