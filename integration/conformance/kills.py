"""`make peers WHAT=kills`: containerd is killed between a container's Create and its Start, and is ready again.

After its restart containerd deletes such a container and waits for the end of its streams: until then CRI serves
nobody. Each round stops containerd while the shim makes the container, so that the Start is never sent, and kills it.
The VMs are stand-ins.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import sys
import threading
import time
from pathlib import Path

import grpc

from integration import records
from integration.framework import enclosure, releases
from integration.framework.cri import Container, Cri
from integration.framework.cri_session import GROUND, STAND_IN_HANDLER, cri_daemon
from integration.framework.leaks import HostState, assert_nothing_left
from integration.framework.waiting import eventually
from protos.cri import v1_pb2 as pb
from pyshim.start.dialect import BINARY
from tests.failpoints.shim import write_launcher

_FAULT = "agent.CreateContainer:before#2=delay(1)"
"""Of the pod's second container: meanwhile containerd is stopped, which has sent Create and has no answer."""
_CREATED_S = 3.0
"""Seconds after which the shim has answered, also on a busy machine."""
_HANGS_S = 60.0


def killed_before_start(cri: Cri, container: Container) -> None:
    """containerd was killed while the container is created and not started."""
    bundle = cri.daemon.directories.bundle(container.id, "k8s.io")
    starting = threading.Thread(target=_start, args=(container,))
    starting.start()
    eventually(bundle.exists, what="containerd has made the bundle", every_s=0.005)
    time.sleep(0.3)  # for Create to be sent
    os.kill(cri.daemon.pid, signal.SIGSTOP)
    time.sleep(_CREATED_S)
    cri.daemon.stop(signal.SIGKILL)
    starting.join()


def _start(container: Container) -> None:
    with contextlib.suppress(grpc.RpcError):  # containerd is gone
        container.start()


def ready_after_s(cri: Cri) -> float:
    """Seconds from containerd's start until CRI serves. Raises AssertionError after _HANGS_S."""
    began = time.monotonic()
    cri.daemon.start()
    cri.connect(within_s=_HANGS_S)
    return time.monotonic() - began


def one_round(cri: Cri) -> tuple[float, bool]:
    """Seconds until containerd was ready, and that the container was never started."""
    with cri.pod(handler=STAND_IN_HANDLER) as pod:
        beside = pod.start()
        container = pod.create()
        killed_before_start(cri, container)
        took_s = ready_after_s(cri)
        was_hit = container.status.state != pb.CONTAINER_RUNNING
        assert beside.is_running, "the container beside it runs on"
        again = pod.start()
        assert again.is_running, "the pod takes new containers"
    return took_s, was_hit


def _slow_shim(directory: Path) -> Path:
    """The new directory, with the shim that meets the fault: containerd passes no variables on."""
    directory.mkdir()
    launcher = directory / BINARY
    write_launcher(str(releases.PROJECT / "bin" / BINARY), str(launcher))
    entry = "from tests.failpoints.shim import main"
    faults = f'import os; os.environ["PYSHIM_FAILPOINTS"] = "{_FAULT}"'
    launcher.write_text(launcher.read_text().replace(entry, f"{faults}\n{entry}"))
    return directory


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m integration.conformance.kills")
    parser.add_argument("--rounds", type=int, default=50)
    rounds = parser.parse_args().rounds
    if enclosure.MARK not in os.environ:
        print("kills: run it with `make peers WHAT=kills`", file=sys.stderr)
        return 2
    GROUND.mkdir(parents=True)
    with cri_daemon(_slow_shim(GROUND / "shim")) as cri:
        before = HostState.look((GROUND,))
        found: list[tuple[float, bool]] = []
        while sum(was_hit for _, was_hit in found) < rounds and len(found) < 2 * rounds:
            found.append(one_round(cri))
        assert_nothing_left(before, (GROUND,))
    seconds = [took_s for took_s, _ in found]
    hits = sum(was_hit for _, was_hit in found)
    figures = f"ready after {statistics.median(seconds):.1f} s, at most {max(seconds):.1f} s"
    print(f"{records.runtime_name()}: {len(found)} kills, {hits} of them between Create and Start; {figures}")
    if hits == rounds:
        records.add("killed between Create and Start", f"{rounds} times, {figures}")
    return int(hits < rounds)


if __name__ == "__main__":
    sys.exit(main())
