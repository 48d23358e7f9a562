"""The order of the samples: a round takes each measurement and its reference close together, so drift hits both."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench import bare_boot, file_io, measures, stub_pods, stub_whole_pods
from bench.measures import PYKATA, RUNC, Ground


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The number of rounds and samples of a run."""

    rounds: int
    starts: int
    """per round"""
    execs: int
    """per round"""
    stdout_mib: int
    stub_mib: int
    """through stdout of a container on the stand-in VM"""
    creates: int
    """per round"""
    pods: int
    """at the same time, for the memory of many"""
    file_rounds: int
    """of fio"""
    fio_ms: int
    """per job"""


FULL = Size(
    rounds=7,
    starts=8,
    execs=8,
    stdout_mib=128,
    stub_mib=1024,
    creates=5,
    pods=20,
    file_rounds=3,
    fio_ms=300,
)
QUICK = Size(
    rounds=2,
    starts=2,
    execs=2,
    stdout_mib=64,
    stub_mib=64,
    creates=2,
    pods=3,
    file_rounds=1,
    fio_ms=200,
)
_TOGETHER = 10
SETTLE_S = 1.0
"""After the last call: the shim has written its state, and its threads wait."""


@dataclass(slots=True)
class Samples:
    """Every sample by series, and which round it was taken in: `by_round[series][round]` is a list."""

    by_round: dict[str, list[list[float]]] = field(default_factory=lambda: defaultdict(list))

    def open_round(self, series: str) -> list[float]:
        values: list[float] = []
        self.by_round[series].append(values)
        return values


def run(ground: Ground, stubbed: Ground, size: Size, progress: Callable[[str], None]) -> Samples:
    """The samples of `size.rounds` rounds. A round before them, thrown away, fills the caches.

    `stubbed` is `ground` with the stand-ins of `integration/framework/stubs.py`.
    """
    samples = Samples()
    initrd = ground.directory / "bare-initrd"
    bare_boot.write_initrd(initrd)
    for number in range(size.rounds + 1):
        progress(f"round {number} of {size.rounds}" if number else "warm-up round")
        target = samples if number else Samples()
        _starts(ground, target, size.starts)
        argv = _in_containers(ground, target, size.execs)
        _first_outputs(ground, target, argv, initrd)
        for series, runtime in (("stdout_pykata", PYKATA), ("stdout_runc", RUNC)):
            target.open_round(series).append(measures.stdout_mb_per_s(ground, runtime, size.stdout_mib))
        _on_stubs(stubbed, target, size)
    return samples


def run_file_io(ground: Ground, below: Path, size: Size, progress: Callable[[str], None], samples: Samples) -> None:
    """Adds the rates of fio. Every round visits every place in turn; the files lie below `below`, on a real disk."""
    progress("fio: pods are started and files laid out")
    for number, places in enumerate(file_io.sample(ground, below, size.file_rounds, size.fio_ms), 1):
        progress(f"fio, round {number} of {size.file_rounds} done")
        for place, rates in places.items():
            for job, rate in rates.items():
                samples.open_round(f"file_{place}_{job}").append(rate)


def _on_stubs(ground: Ground, samples: Samples, size: Size) -> None:
    """The shim's own share, on a stand-in for a VM: executed shims first, then forked ones."""
    ten, stdout = (samples.open_round(f"stub_{name}") for name in ("ten", "stdout"))
    _creates(ground, samples, "stub", size.creates)
    ten.append(stub_pods.together_s(ground, _TOGETHER))
    stdout.append(measures.stdout_mb_per_s(ground, PYKATA, size.stub_mib, prefix=f"flood{size.stub_mib}-"))
    _deletes(ground, samples, size.starts)
    samples.open_round("stub_stdout_runc").append(measures.stdout_mb_per_s(ground, RUNC, size.stub_mib))
    with ground.zygote() as zygote:
        bare, start = (samples.open_round(f"forked_{name}") for name in ("bare", "start"))
        for _ in range(size.starts):
            bare.append(measures.bare_interpreter_s())
            start.append(measures.start_s(ground, PYKATA))
        _creates(ground, samples, "forked", size.creates)
        with stub_whole_pods.running(ground, 1) as pids:
            time.sleep(SETTLE_S)
            samples.open_round("forked_lone_pss").append(measures.memory_of(pids[0]).pss_mib)
        with stub_whole_pods.running(ground, size.pods) as pids:
            time.sleep(SETTLE_S)
            pss = [measures.memory_of(pid).pss_mib for pid in pids]
            with_zygote_mib = sum(pss) + measures.memory_of(zygote.pid).pss_mib
            samples.open_round("forked_pss").append(with_zygote_mib / len(pss))
            private = [measures.memory_of(pid).private_mib for pid in pids]
            samples.open_round("forked_private").append(sum(private) / len(private))


def _creates(ground: Ground, samples: Samples, kind: str, count: int) -> None:
    samples.open_round(f"{kind}_create").extend(stub_pods.create_s(ground) for _ in range(count))


def _deletes(ground: Ground, samples: Samples, count: int) -> None:
    """Beside a pod that runs: most containers end before their pod."""
    series = ("delete_pykata", "delete_cpu_pykata", "delete_runc", "delete_cpu_runc")
    wall, cpu, runc_wall, runc_cpu = (samples.open_round(name) for name in series)
    with stub_whole_pods.pod(ground) as pod:
        spec = stub_whole_pods.spec_of("delete", pod.shim.container, "container")
        for _ in range(count):
            for runtime, walls, cpus in ((PYKATA, wall, cpu), (RUNC, runc_wall, runc_cpu)):
                cost = measures.delete_cost(ground, runtime, spec)
                walls.append(cost.wall_s)
                cpus.append(cost.cpu_s)


def _starts(ground: Ground, samples: Samples, count: int) -> None:
    bare, pykata, runc = (samples.open_round(f"start_{name}") for name in ("bare", "pykata", "runc"))
    for _ in range(count):
        bare.append(measures.bare_interpreter_s())
        pykata.append(measures.start_s(ground, PYKATA))
        bare.append(measures.bare_interpreter_s())
        runc.append(measures.start_s(ground, RUNC))


def _in_containers(ground: Ground, samples: Samples, execs: int) -> list[str]:
    """Memory and exec, measured in a running container. Returns the VMM's command line, for the bare boots."""
    with measures.container(ground, PYKATA) as name, measures.container(ground, RUNC) as reference:
        daemon, runc_daemon = measures.daemon_of(PYKATA, name), measures.daemon_of(RUNC, reference)
        for series, pid in (("pykata", daemon.pid), ("runc", runc_daemon.pid)):
            memory = measures.memory_of(pid)
            samples.open_round(f"pss_{series}").append(memory.pss_mib)
            samples.open_round(f"private_{series}").append(memory.private_mib)
        _execs(ground, samples, execs, (name, reference), daemon.pid)
        (vmm,) = PYKATA.vmms(name)
        return list(vmm.command)


def _execs(ground: Ground, samples: Samples, count: int, names: tuple[str, str], daemon_pid: int) -> None:
    pykata, runc, client, cpu = (
        samples.open_round(f"exec_{name}") for name in ("pykata", "runc", "client", "shim_cpu")
    )
    for _ in range(count):
        before_s = measures.cpu_s(daemon_pid)
        pykata.append(measures.exec_s(ground, names[0]))
        cpu.append(measures.cpu_s(daemon_pid) - before_s)
        runc.append(measures.exec_s(ground, names[1]))
        client.append(measures.client_s(ground))


def _first_outputs(ground: Ground, samples: Samples, argv: list[str], initrd: Path) -> None:
    """One run of either kind of shim between two bare boots, and the reference shim."""
    bare, pykata, runc = (samples.open_round(f"output_{name}") for name in ("bare", "pykata", "runc"))
    bare.append(bare_boot.boot_s(argv, initrd))
    pykata.append(measures.first_output_s(ground, PYKATA))
    warm = replace(ground, config=ground.warm)
    samples.open_round("output_cloned").append(measures.first_output_s(warm, PYKATA))
    bare.append(bare_boot.boot_s(argv, initrd))
    _alone(ground, samples)
    bare.append(bare_boot.boot_s(argv, initrd))
    with ground.zygote():
        samples.open_round("output_forked").append(measures.first_output_s(ground, PYKATA))
        samples.open_round("output_cloned_forked").append(measures.first_output_s(warm, PYKATA))
    bare.append(bare_boot.boot_s(argv, initrd))
    runc.append(measures.first_output_s(ground, RUNC))


def _alone(ground: Ground, samples: Samples) -> None:
    """Pods without containerd: booted and cloned, their image shared and on disks."""
    for series, config, on_disks in (
        ("shared", ground.config, False),
        ("disks", ground.unshared, True),
        ("cloned_shared", ground.warm, False),
        ("cloned_disks", ground.warm_unshared, True),
    ):
        found = measures.alone(ground, config, on_disks=on_disks, settle_s=SETTLE_S)
        samples.open_round(f"alone_{series}").append(found.output_s)
        samples.open_round(f"pod_pss_{series}").append(found.pss_mib)
