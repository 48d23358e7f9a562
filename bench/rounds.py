"""The order of the samples: a round takes each measurement and its reference close together, so drift hits both."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from bench import bare_boot, measures
from bench.measures import PYKATA, RUNC, Ground


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much of everything one run does."""

    rounds: int
    starts: int
    """per round"""
    execs: int
    """per round"""
    stdout_mib: int


FULL = Size(rounds=7, starts=8, execs=8, stdout_mib=128)
QUICK = Size(rounds=2, starts=2, execs=2, stdout_mib=64)


@dataclass(slots=True)
class Samples:
    """Every sample by series, and which round it was taken in: `by_round[series][round]` is a list."""

    by_round: dict[str, list[list[float]]] = field(default_factory=lambda: defaultdict(list))

    def open_round(self, series: str) -> list[float]:
        values: list[float] = []
        self.by_round[series].append(values)
        return values


def run(ground: Ground, size: Size, progress: Callable[[str], None]) -> Samples:
    """The samples of `size.rounds` rounds. A round before them, thrown away, fills the caches."""
    samples = Samples()
    initrd = ground.directory / "bare-initrd"
    bare_boot.write_initrd(initrd)
    for number in range(size.rounds + 1):
        progress(f"round {number} of {size.rounds}" if number else "warm-up round")
        target = samples if number else Samples()
        _starts(ground, target, size.starts)
        _in_containers(ground, target, size.execs, initrd)
        for series, runtime in (("stdout_pykata", PYKATA), ("stdout_runc", RUNC)):
            target.open_round(series).append(measures.stdout_mb_per_s(ground, runtime, size.stdout_mib))
    return samples


def _starts(ground: Ground, samples: Samples, count: int) -> None:
    bare, pykata, runc = (samples.open_round(f"start_{name}") for name in ("bare", "pykata", "runc"))
    for _ in range(count):
        bare.append(measures.bare_interpreter_s())
        pykata.append(measures.start_s(ground, PYKATA))
        bare.append(measures.bare_interpreter_s())
        runc.append(measures.start_s(ground, RUNC))


def _in_containers(ground: Ground, samples: Samples, execs: int, initrd: Path) -> None:
    """What needs a running container: memory, exec, and the VMM's command line for the bare boots."""
    with measures.container(ground, PYKATA) as name, measures.container(ground, RUNC) as reference:
        daemon, runc_daemon = measures.daemon_of(PYKATA, name), measures.daemon_of(RUNC, reference)
        for series, pid in (("pykata", daemon.pid), ("runc", runc_daemon.pid)):
            memory = measures.memory_of(pid)
            samples.open_round(f"pss_{series}").append(memory.pss_mib)
            samples.open_round(f"private_{series}").append(memory.private_mib)
        _execs(ground, samples, execs, (name, reference), daemon.pid)
        (vmm,) = PYKATA.vmms(name)
    _first_outputs(ground, samples, list(vmm.command), initrd)


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
    """One run between two bare boots, and the reference shim."""
    bare, pykata, runc = (samples.open_round(f"output_{name}") for name in ("bare", "pykata", "runc"))
    bare.append(bare_boot.boot_s(argv, initrd))
    pykata.append(measures.first_output_s(ground, PYKATA))
    bare.append(bare_boot.boot_s(argv, initrd))
    runc.append(measures.first_output_s(ground, RUNC))
