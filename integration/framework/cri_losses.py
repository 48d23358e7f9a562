"""Pods of a real containerd that lose a part, or containerd itself, at a random moment. Each leaves nothing behind.

`make peers WHAT=soak` runs it on the chosen release (CONTAINERD) and sandboxer (SANDBOXER). By hand, in an enclosure:
`python -m integration.framework.enclosure .venv/bin/python -m integration.framework.cri_losses --each 5 --warm`.
With `--together 20`, that many pods live, and lose parts, at once, before each has its life alone.

Without `--victim` it adds its result to the README's table of releases.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from integration import records

from . import boots, processes, releases
from .cri import Cri
from .cri_session import GROUND, PROJECT, cri_daemon
from .leaks import HostState, assert_nothing_left
from .processes import Process
from .runtime import Runtime
from .soak import Loss, kill
from .waiting import eventually

VICTIMS = ("shim", "vmm", "virtiofsd", "frozen", "containerd")
"""`frozen` is a VMM that is stopped: nothing in the guest answers any more."""
_OF_A_POD = VICTIMS[:-1]
_IGNORED = (Path("/run/pyshim-integration"),)
_REMOVED_S = 120.0


@dataclass(slots=True, kw_only=True)
class Life:
    """A pod with a container and a command in it, as a kubelet has it. `error` is empty when all went well."""

    cri: Cri
    name: str = "lossy"
    doing: str = ""
    """The call under way, or the last."""
    error: str = ""
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, name="life of a pod")

    def _run(self) -> None:
        try:
            self._live()
        except (grpc.RpcError, AssertionError) as error:
            self.error = f"{self.doing}: {error}"

    def _live(self) -> None:
        self.doing = "RunPodSandbox"
        pod = self.cri.run_pod(self.name)
        self.doing = "CreateContainer"
        container = pod.create()
        self.doing = "StartContainer"
        container.start()
        self.doing = "ExecSync"
        assert container.sh("echo here") == "here\n"
        self.doing = "StopContainer"
        container.stop(0)
        self.doing = "RemoveContainer"
        container.remove()
        self.doing = "StopPodSandbox"
        pod.stop()
        self.doing = "RemovePodSandbox"
        pod.remove()


def found(runtime: Runtime, victim: str) -> list[Process]:
    """Those of the one pod that there is."""
    match victim:
        case "shim":
            return [each for each in processes.find(runtime.binary) if each.command[-1] == "serve"]
        case "virtiofsd":
            return [each for each in processes.find("virtiofsd") if "virtiofsd" in each.command[0]]
    return [each for each in processes.find("qemu-system-") if "qemu-system-" in each.command[0]]


def lose(cri: Cri, runtime: Runtime, victim: str, moment_s: float) -> Loss:
    """A pod whose `victim` is killed that long after it was first seen; the kubelet then removes what it finds."""
    before = HostState.look(_IGNORED)
    life, met = Life(cri=cri), False
    life.thread.start()
    try:
        if victim != "containerd":

            def is_there() -> bool:
                return bool(found(runtime, victim)) or not life.thread.is_alive()

            eventually(is_there, what=f"the {victim} is there", every_s=0.02)
        time.sleep(moment_s)  # the random moment: what this is about
        doing = life.doing
        if victim == "containerd":
            met = life.thread.is_alive()
            cri.daemon.stop(signal.SIGKILL)
        else:
            met = kill(found(runtime, victim), frozen=victim == "frozen")
    finally:
        life.thread.join()
        if victim == "containerd":
            cri.daemon.start()
            cri.connect()
    problem = ""
    try:
        eventually(lambda: _is_empty(cri), what="every pod is removed", within_s=_REMOVED_S, every_s=1)
        assert_nothing_left(before, _IGNORED)
    except AssertionError as error:
        problem = str(error)
    return Loss(victim=victim, moment_s=moment_s, doing=doing, met=met, problem=problem)


def _is_empty(cri: Cri) -> bool:
    """What a kubelet does with each pod that should not be there, again until it succeeds."""
    try:
        for sandbox in cri.sandboxes():
            cri.call("StopPodSandbox", pod_sandbox_id=sandbox)
            cri.call("RemovePodSandbox", pod_sandbox_id=sandbox)
        return not cri.sandboxes()
    except grpc.RpcError:
        return False


def lose_together(cri: Cri, runtime: Runtime, pods: int, chance: random.Random, life_s: float) -> str:
    """That many pods live at once, and until all lives have ended a random one loses a random part now and then. Then
    the kubelet removes what it finds. Raises AssertionError for what is left, and for a `delete` that containerd ended.
    """
    before, log_size = HostState.look(_IGNORED), cri.daemon.log.stat().st_size
    lives = [Life(cri=cri, name=f"lossy{number}") for number in range(pods)]
    for life in lives:
        life.thread.start()
    lost = Counter[str]()
    while any(life.thread.is_alive() for life in lives):
        time.sleep(chance.uniform(0, 2 * life_s))  # half of them or so lose a part
        victim = chance.choice(_OF_A_POD)
        if there := found(runtime, victim):
            lost[victim] += kill([chance.choice(there)], frozen=victim == "frozen")
    eventually(lambda: _is_empty(cri), what="every pod is removed", within_s=_REMOVED_S * pods, every_s=1)
    assert_nothing_left(before, _IGNORED)
    with cri.daemon.log.open() as log:
        log.seek(log_size)
        ended = [line for line in log if "signal: killed" in line]
    assert not ended, f"calls of the shim's binary that containerd ended: {ended}"
    whole = sum(not life.error for life in lives)
    return f"{pods} pods at once, {lost.total()} parts lost: {dict(lost)}; {whole} pods lived to their end"


def undisturbed(cri: Cri, runtime: Runtime) -> dict[str, float]:
    """Seconds that each victim is there in a whole life. Raises AssertionError unless all of it went well."""
    life, seen = Life(cri=cri), dict[str, list[float]]()
    life.thread.start()
    while life.thread.is_alive():
        for victim in VICTIMS:
            if victim == "containerd" or found(runtime, victim):
                seen.setdefault(victim, []).append(time.monotonic())
        time.sleep(0.02)
    assert not life.error, life.error
    return {victim: moments[-1] - moments[0] for victim, moments in seen.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--each", type=int, default=10, help="pods for each victim; default 10")
    parser.add_argument("--victim", action="append", choices=VICTIMS, help="default: all")
    parser.add_argument("--warm", action="store_true", help="VMs continue from a template in place of booting")
    parser.add_argument("--together", type=int, default=0, metavar="PODS", help="first, so many pods at once")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    asked = parser.parse_args()
    GROUND.mkdir(parents=True)
    runtime = Runtime.chosen()
    if asked.warm:
        boots.Template(GROUND / "template").bind()
    chance = random.Random(asked.seed)
    plans = [victim for victim in asked.victim or VICTIMS for _ in range(asked.each)]
    chance.shuffle(plans)
    losses = []
    with cri_daemon(PROJECT / "bin") as cri:
        undisturbed(cri, runtime)  # containerd's own furniture is there from the first pod on
        there_s = undisturbed(cri, runtime)
        where = f"{records.runtime_name()}, sandboxer {releases.sandboxer()}"
        print(f"{where}: seed {asked.seed}; a life takes {there_s['containerd']:.1f} s", flush=True)
        if asked.together:
            print(lose_together(cri, runtime, asked.together, chance, there_s["containerd"]), flush=True)
        for victim in plans:
            losses.append(lose(cri, runtime, victim, chance.uniform(0, there_s[victim])))
            print(losses[-1], flush=True)
    met = Counter(loss.victim for loss in losses if loss.met)
    bad = [loss for loss in losses if loss.problem]
    print(f"{where}: {len(losses)} pods, {met.total()} lost a part: {dict(met)}; {len(bad)} with a problem", flush=True)
    if not bad and not asked.victim:
        how = " by the Sandbox API" if releases.sandboxer() == "shim" else ""
        records.add(f"pods{how} that lost a part at a random moment", f"{met.total()}, nothing left")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
