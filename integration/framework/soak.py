"""Pods that lose a part at a random moment, and rounds of a container in one pod. Each leaves nothing behind.

`make peers WHAT=soak` runs it in full, the tests a small part of it. By hand, in an enclosure:
`python -m integration.framework.enclosure .venv/bin/python -m integration.framework.soak --shim 20 --rounds 0`.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from . import images, zygote
from .cri_soak import private_kib
from .faulty_pod import FaultyPod, faulty_pod
from .leaks import HostState, assert_nothing_left
from .processes import Process
from .runtime import Runtime
from .waiting import eventually

PROJECT = Path(__file__).resolve().parents[2]
VICTIMS: dict[str, Callable[[Runtime, str], list[Process]]] = {
    "shim": Runtime.shims,
    "vmm": Runtime.vmms,
    "virtiofsd": Runtime.virtiofsds,
    "frozen": Runtime.vmms,
    "agent": Runtime.vmms,
}
"""`frozen` is a VMM that is stopped: nothing in the guest answers any more. `agent` is the guest's PID 1, whose end is
the kernel's: the app container makes it panic.
"""
AT_ONCE = 2
_WARM_UP = 5
_FDS_KEPT = 2
_KIB_A_ROUND = 24.0
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    runtime: Runtime
    directory: Path
    rootfs: Path

    def pod(self, command: list[str] | None = None) -> contextlib.AbstractContextManager[FaultyPod]:
        """A pod of its own name and network; its app runs `command`."""
        number = next(_numbers)
        return faulty_pod(
            self.runtime,
            PROJECT / "bin",
            self.directory,
            self.rootfs,
            name=f"soak{number}pod",
            subnet=number % 250 + 1,
            command=command,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    victim: str
    moment_s: float
    """After the victim was first seen."""
    doing: str
    """The driver's call under way."""
    met: bool
    """It was still there at that moment."""
    problem: str

    def __str__(self) -> str:
        what = f"{self.victim:9} {self.moment_s:6.2f} s  {'killed' if self.met else 'gone by then':12}"
        return f"{what} during {self.doing:26} {self.problem or 'clean'}"


def undisturbed(ground: Ground) -> float:
    """Seconds from the shim's start to its pod's end. Raises AssertionError when anything is left."""
    with ground.pod() as pod:
        started = time.monotonic()
        pod.live()
        pod.end()
        took_s = time.monotonic() - started
        assert not pod.error, pod.error
        pod.clean_up()
        pod.assert_nothing_left()
    return took_s


def lose(ground: Ground, victim: str, moment_s: float) -> Loss:
    """A pod that loses its `victim` that long after it was first seen; then containerd's clean-up."""
    command = ["sh", "-c", f"sleep {moment_s:.2f}; echo c > /proc/sysrq-trigger"] if victim == "agent" else None
    with ground.pod(command) as pod:

        def drive() -> None:
            pod.live()
            pod.end()

        driver = threading.Thread(target=drive, name=f"drive {pod.name}")
        driver.start()
        doing, met = "", False
        try:

            def there() -> bool:
                return bool(VICTIMS[victim](ground.runtime, pod.name)) or not driver.is_alive()

            eventually(there, what=f"the {victim} of {pod.name} is there", every_s=0.02)
            time.sleep(moment_s)  # the random moment: what this is about
            doing = pod.calls[-1] if pod.calls else "start"
            met = victim == "agent" or kill(VICTIMS[victim](ground.runtime, pod.name), frozen=victim == "frozen")
        finally:
            driver.join()
        problem = ""
        try:
            pod.app_shim.delete()
            pod.shim.delete()
            pod.assert_nothing_left()
        except AssertionError as exc:
            problem = str(exc)
    return Loss(victim=victim, moment_s=moment_s, doing=doing, met=met, problem=problem)


def kill(found: list[Process], *, frozen: bool) -> bool:
    """They have got SIGKILL, or SIGSTOP where `frozen`; False when one was not there."""
    for process in found:
        try:
            os.kill(process.pid, signal.SIGSTOP if frozen else signal.SIGKILL)
        except ProcessLookupError:
            return False
    return bool(found)


def stand_still(found: list[Process], *, for_s: float) -> bool:
    """The processes were stopped for that long and go on; False when there was none."""
    stopped = []
    for process in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGSTOP)
            stopped.append(process.pid)
    time.sleep(for_s if stopped else 0)
    for pid in stopped:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    return bool(stopped)


def losses(ground: Ground, wanted: dict[str, int], *, seed: int, life_s: float) -> Iterator[Loss]:
    """So many pods per victim, each losing it at a random moment of the life; two at a time."""
    chance = random.Random(seed)
    plans = [(victim, chance.uniform(0, life_s)) for victim, count in wanted.items() for _ in range(count)]
    chance.shuffle(plans)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield from pool.map(lambda plan: lose(ground, *plan), plans)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Descriptors and private memory of a pod's processes."""

    fds: dict[str, int]
    shim_kib: int

    @classmethod
    def of(cls, runtime: Runtime, name: str) -> Sizes:
        pids = {what: VICTIMS[what](runtime, name)[0].pid for what in ("shim", "vmm", "virtiofsd")}
        fds = {what: len(os.listdir(f"/proc/{pid}/fd")) for what, pid in pids.items()}
        return cls(fds=fds, shim_kib=private_kib(pids["shim"]))


def rounds(ground: Ground, count: int) -> tuple[Sizes, Sizes]:
    """The sizes after a few rounds of a container in one pod, and after `count` rounds. The pod is gone then."""
    with ground.pod() as pod:
        pod.boot()
        warm = None
        for number in range(1, count + 1):
            pod.one_round()
            pod.app_shim.delete()
            if number == min(_WARM_UP, count):
                warm = Sizes.of(ground.runtime, pod.name)
        last = Sizes.of(ground.runtime, pod.name)
        pod.clean_up()
        pod.assert_nothing_left()
    assert warm is not None, "at least one round"
    return warm, last


def assert_flat(warm: Sizes, last: Sizes, count: int) -> float:
    """No process has more descriptors, and the shim no more memory, than noise; the slope in KiB a round."""
    grown = {what: last.fds[what] - warm.fds[what] for what in warm.fds}
    assert all(more <= _FDS_KEPT for more in grown.values()), f"descriptors grew: {warm} to {last}"
    slope = (last.shim_kib - warm.shim_kib) / max(1, count - _WARM_UP)
    assert slope <= _KIB_A_ROUND, f"the shim's memory grew by {slope:.1f} KiB a round: {warm} to {last}"
    return slope


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for victim in VICTIMS:
        parser.add_argument(f"--{victim}", type=int, default=0, help=f"pods that lose their {victim}")
    parser.add_argument("--rounds", type=int, default=0, help="rounds of a container in one pod")
    parser.add_argument("--pods", type=int, default=0, help="whole pods, one after the other")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    asked = parser.parse_args()
    directory = Path("/run/pyshim-integration")
    directory.mkdir(exist_ok=True)
    ground = Ground(
        runtime=Runtime.chosen(), directory=directory / "pods", rootfs=images.unpack_rootfs(directory / "rootfs")
    )
    zygote.keep_away()
    life_s = undisturbed(ground)
    print(f"seed {asked.seed}; a life takes {life_s:.1f} s", flush=True)
    before = HostState.look((directory,))
    wanted = {victim: getattr(asked, victim) for victim in VICTIMS}
    found = []
    with zygote.left_behind():  # as on a node: the first `start` leaves one, the others' shims are forked
        for loss in losses(ground, wanted, seed=asked.seed, life_s=life_s):
            found.append(loss)
            print(loss, flush=True)
        met = {victim: sum(loss.met for loss in found if loss.victim == victim) for victim in VICTIMS}
        print(f"{len(found)} pods lost a part, {sum(met.values())} while it was there: {met}", flush=True)
        for _ in range(asked.pods):
            undisturbed(ground)
        print(f"{asked.pods} pods came and went", flush=True)
        if asked.rounds:
            warm, last = rounds(ground, asked.rounds)
            print(f"{asked.rounds} rounds in one pod: {warm} to {last}", flush=True)
            print(f"the shim grew by {assert_flat(warm, last, asked.rounds):+.1f} KiB a round", flush=True)
    assert_nothing_left(before, (directory,))
    print("nothing left", flush=True)
    return 1 if any(loss.problem for loss in found) else 0


if __name__ == "__main__":
    sys.exit(main())
