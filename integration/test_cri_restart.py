"""containerd is away while its pods go on: what they print and how they end is there when it comes back."""

from __future__ import annotations

import itertools
import signal
from pathlib import Path

import pytest

from protos.cri import v1_pb2 as pb

from .framework import load
from .framework.cri import Container, Cri
from .framework.runtime import Runtime
from .framework.waiting import eventually

pytestmark = pytest.mark.vm

_PODS = load.amount(2, 3)
_COUNT = "i=0; while :; do i=$((i+1)); echo $i; sleep 0.05; done"
_END = "until [ -e /gate/open ]; do sleep 0.1; done; echo over > /gate/$0; exit $1"


def numbers(container: Container) -> list[int]:
    """The lines it has printed; the last one may be in the middle of being written."""
    return [int(line) for line in container.log().splitlines()[:-1]]


def numbers_after(container: Container, count: int) -> list[int]:
    """The lines it has printed, once there are more than `count`."""
    eventually(lambda: len(numbers(container)) > count, what=f"the log has more than {count} lines")
    return numbers(container)


def test_output_continues_and_exits_of_the_absence_arrive_in_many_pods(
    cri: Cri, runtime: Runtime, scratch: Path
) -> None:
    gate = scratch / "gate"
    gate.mkdir()
    mount = pb.Mount(container_path="/gate", host_path=str(gate))
    pods = [cri.run_pod(f"apart{index}") for index in range(_PODS)]
    try:
        counting = [pod.start("sh", "-c", _COUNT) for pod in pods]
        ending = [
            pod.start("sh", "-c", _END, f"over{index}", str(40 + index), mounts=[mount])
            for index, pod in enumerate(pods)
        ]
        eventually(lambda: all(len(numbers(one)) > 3 for one in counting), what="every pod counts")
        shims = [shim.pid for pod in pods for shim in runtime.shims(pod.id)]

        cri.daemon.stop(signal.SIGTERM)
        had = [numbers(one) for one in counting]
        (gate / "open").touch()
        eventually(
            lambda: all((gate / f"over{index}").exists() for index in range(_PODS)), what="every container has ended"
        )
        cri.daemon.start()
        cri.connect()

        assert [one.exit_code() for one in ending] == [40 + index for index in range(_PODS)]
        ending[0].remove()
        assert pods[0].start("echo", "new").run_to_end() == "new\n"
        for container, before in zip(counting, had, strict=True):
            assert container.is_running
            found = numbers_after(container, len(before) + 40)
            assert found == sorted(set(found))
            # Only what the old containerd had taken and not yet written may be missing: one gap, and on a busy machine
            # a whole buffer of it.
            gaps = [after - one for one, after in itertools.pairwise(found) if after != one + 1]
            assert len(gaps) <= 1
            assert container.sh("echo here") == "here\n"
        assert [shim.pid for pod in pods for shim in runtime.shims(pod.id)] == shims
        assert all(pod.is_ready for pod in pods)
        counting[0].stop(0)
        assert counting[0].exit_code() == 137
    finally:
        for pod in pods:
            pod.remove()
