"""The undo matrix on the real stack: representative steps of a pod's life fail, hang, or are the shim's last.

After containerd's clean-up calls nothing of the pod is left, and the user's error names the step. All steps, on
fakes: tests/unit/failpoints. The table of the last run is in .build/undo-matrix-real.txt.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from .framework import load
from .framework.containerd import Containerd
from .framework.faulty_pod import faulty_pod
from .framework.runtime import Runtime

PROJECT = Path(__file__).resolve().parents[1]
TABLE = PROJECT / ".build" / "undo-matrix-real.txt"
_AT_ONCE = 3
"""Pods at a time; one that hangs costs no processor."""

ERRORS = (
    "host.read_bytes:before",
    "config.load:after",
    "host.facts:before",
    "host.capacity:after",
    "records.open:before",
    "records.open:after",
    "ledger.acquire.directory:before",
    "host.make_directory:after",
    "host.mount:before",
    "host.mount:after#2",
    "network.connect:before",
    "children.spawn:after",
    "ledger.acquire.link:before",
    "ledger.acquire.ingress:before",
    "ledger.acquire.ingress:after",
    "network.connect:after",
    "ledger.acquire.socket:before",
    "ledger.acquire.process:before",
    "ledger.acquire.process:after#2",
    "host.start_virtiofsd:after",
    "hypervisor.create:before",
    "ledger.acquire.process:before#4",
    "hypervisor.create:after",
    "hypervisor.start:after",
    "agent.connect:before",
    "agent.CreateSandbox:after",
    "host.open_streams:after#2",
    "agent.CreateContainer:after",
    "agent.ExecProcess:before",
)
KILLS = (
    "config.load:after",
    "records.open:after",
    "ledger.acquire.directory:after",
    "host.make_directory:after#2",
    "ledger.acquire.mount:after",
    "host.mount:after#2",
    "children.spawn:after",
    "ledger.acquire.link:after",
    "ledger.acquire.ingress:before",
    "ledger.acquire.ingress:after",
    "network.connect:after",
    "ledger.acquire.socket:after",
    "ledger.acquire.process:after",
    "ledger.acquire.process:before#2",
    "ledger.acquire.process:before#4",
    "hypervisor.create:after",
    "hypervisor.start:after",
    "agent.CreateContainer:after",
    "ledger.release.mount:after",
    "hypervisor.stop:before",
)
HANGS = {
    "records.open:before": "open state of sandbox",
    "host.mount:before": "mount '",
    "network.connect:before": "connect network namespace '/run/netns/",
    "host.start_virtiofsd:before": "start virtiofsd '",
    "hypervisor.start:before": "start vm",
    "children.spawn:before": "connect network namespace '/run/netns/",
}


@pytest.mark.vm
@pytest.mark.timeout(900)
def test_any_fault_in_a_pods_life_is_reported_and_leaves_nothing(
    runtime: Runtime, containerd: Containerd, scratch: Path, plain_rootfs: Path
) -> None:
    """One test for all: they run side by side, and each looks for what is left of its own pod."""

    def row(number: int, fault: str, named: str | None) -> tuple[str, str]:
        line, problem = attempt(number, fault, named)
        if problem and "does not name" in problem:
            # A guest on a crowded machine may miss a deadline of its own before the fault is reached.
            line, problem = attempt(number + 100, fault, named)
        return line, problem

    def attempt(number: int, fault: str, named: str | None) -> tuple[str, str]:
        with faulty_pod(
            runtime, PROJECT / "bin", scratch, plain_rootfs, name=f"undo{number}pod", subnet=number, faults=fault
        ) as pod:
            pod.live()
            error = pod.error
            problem = ""
            try:
                pod.clean_up()
                pod.assert_nothing_left()
            except AssertionError as exc:
                problem = str(exc)
        if named is not None and named not in error:
            problem += f" says {error!r} after {pod.calls}, which does not name {named!r}"
        return f"{fault:44} {'clean' if not problem else 'LEFT '}  {error}", f"{fault}: {problem}" if problem else ""

    plans = load.sample(list(_plans()), every=4)
    with ThreadPoolExecutor(_AT_ONCE) as short, ThreadPoolExecutor(len(HANGS)) as long:
        pools = [long if "=hang" in fault else short for fault, _ in plans]
        jobs = [
            pool.submit(row, number, *plan) for number, (pool, plan) in enumerate(zip(pools, plans, strict=True), 1)
        ]
        rows = [job.result() for job in jobs]

    TABLE.write_text("\n".join(line for line, _ in rows) + "\n")
    print(f"\n{TABLE.read_text()}{len(rows)} faults on the real stack: {TABLE}")
    assert len(rows) >= load.amount(12, 40)
    problems = [problem for _, problem in rows if problem]
    assert not problems, "\n".join(problems)


def _plans() -> Iterator[tuple[str, str | None]]:
    """The fault, and the text that the user must read; None where the shim is not there to say anything."""
    for point, words in HANGS.items():
        yield f"{point}=hang", words
    for point in ERRORS:
        yield f"{point}=error", f"failpoint {point.partition('#')[0]}"
    for point in KILLS:
        yield f"{point}=kill", None
