"""`python -m bench`, inside an enclosure (`make bench` makes one): measure, print, write bench/results."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from bench import chart, file_io, peers, report, rounds, stub_pods
from bench.ground import GROUND, PROJECT, containerd_up
from bench.measures import Ground
from integration.framework import enclosure, stubs
from integration.framework.runtime import Runtime
from pyshim.resources.probe import probe_host

RESULTS = PROJECT / "bench" / "results"
# Only a part of the table: the stored results stay as they are.
PART_RESULTS = PROJECT / ".build" / "bench"


def main() -> int:
    arguments = _arguments()
    if enclosure.MARK not in os.environ:
        print("bench: runs inside an enclosure (hint: `make bench`)", file=sys.stderr)
        return 2
    try:
        if arguments.output and not enclosure.outlives(arguments.output):
            raise ValueError(f"write results to {str(arguments.output)!r}: it is gone when the measuring has ended")
        found_peers = {program.name: peers.runtime_of(program) for program in arguments.peer}
        if len(found_peers) < len(arguments.peer):
            raise ValueError("use several shims: two have the same file name (hint: copy one to another NAME)")
    except ValueError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    if found_peers:
        return _beside(arguments, found_peers)
    if not file_io.FIO.exists():
        print(
            f"bench: find {str(file_io.FIO)!r}: not installed (hint: `make bench` or apt-get install fio)",
            file=sys.stderr,
        )
        return 2
    size = rounds.QUICK if arguments.quick else rounds.FULL
    if arguments.runs:
        size = replace(size, rounds=arguments.runs)
    load_before = os.getloadavg()[0]
    only_files = arguments.only_files
    with containerd_up() as ground:
        samples, of_idle = _measure(ground, size, only_files)
    found = report.rows(samples)
    facts = {**_facts(size, load_before), **of_idle}
    if only_files:
        facts["rounds"] = str(size.file_rounds)
        del facts["per round"]
    print(report.as_text(found))
    target = arguments.output or (PART_RESULTS if only_files else RESULTS)
    target.mkdir(parents=True, exist_ok=True)
    report.write_json(target / "bench.json", found, samples, facts, arguments.note)
    (target / "bench.md").write_text(report.as_markdown(found, facts, arguments.note))
    chart.write_svg(target / "bench.svg", found, f"{facts['accelerator']}, {facts['rounds']} rounds")
    print(f"written: {target}/bench.json, bench.md, bench.svg")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description="What the shim costs, as ratios to references."
    )
    parser.add_argument("--runs", type=int, default=0, metavar="N", help=f"rounds; default {rounds.FULL.rounds}")
    parser.add_argument("--quick", action="store_true", help="two rounds with little in them: does it work at all")
    parser.add_argument("--note", default="", help="a sentence for the results, about the state of the machine")
    parser.add_argument("--only-files", action="store_true", help="only the rates of fio; written to .build/bench")
    parser.add_argument(
        "--peer",
        type=Path,
        action="append",
        default=[],
        metavar="SHIM",
        help="measure only ours beside this other shim, Kata's or runc's; may be repeated",
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="default: bench/results; not in /run, /tmp or /dev/shm"
    )
    arguments = parser.parse_args()
    if arguments.runs < 0:
        parser.error(f"--runs {arguments.runs}: expected 1 or more")
    if arguments.only_files and (arguments.peer or arguments.runs):
        parser.error("--only-files: takes neither --peer nor --runs")
    return arguments


def _beside(arguments: argparse.Namespace, runtimes: dict[str, Runtime]) -> int:
    """The table of `peers.py`, in peer.md; the samples, round by round, in peer.jsonl."""
    target, load_before = arguments.output or RESULTS, os.getloadavg()[0]
    count = arguments.runs or (rounds.QUICK if arguments.quick else rounds.FULL).rounds
    try:
        with containerd_up(arguments.peer) as ground:
            versions = {each.name: _version(each, runtimes[each.name]) for each in arguments.peer}
            rust = [name for name, version in versions.items() if "(Rust)" in version]
            found = peers.measure(ground, runtimes, rust, count, lambda text: print(text, flush=True))
            facts = {**_host(load_before), **versions, "rounds": str(count)}
            text = peers.as_markdown(found, facts, arguments.note)
            target.mkdir(parents=True, exist_ok=True)
            (target / "peer.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in found))
            (target / "peer.md").write_text(text)
            print(text)
    except AssertionError as left:
        print(f"bench: a shim has left something: {left}", file=sys.stderr)  # Kata's leaves cgroups at times
    return 0


def _measure(ground: Ground, size: rounds.Size, only_files: bool) -> tuple[rounds.Samples, dict[str, str]]:
    """All samples, and as text the one measurement that is made once: how often an idle shim wakes."""
    started = time.monotonic()

    def progress(text: str) -> None:
        print(f"[{time.monotonic() - started:4.0f} s] {text}", flush=True)

    samples, of_idle = rounds.Samples(), {}
    if not only_files:
        stubbed = replace(ground, config=stubs.config(GROUND))
        samples = rounds.run(ground, stubbed, size, progress)
        with stub_pods.running(stubbed, 1) as (pid,):
            time.sleep(rounds.SETTLE_S)
            of_idle["idle wake-ups of a shim in 30 s"] = str(stub_pods.wakeups(pid, 30.0))
    rounds.run_file_io(ground, PROJECT / ".build", size, progress, samples)
    return samples, of_idle


def _facts(size: rounds.Size, load_before: float) -> dict[str, str]:
    return {
        **_host(load_before),
        "accelerator": "kvm" if probe_host().kvm_usable else "tcg (emulation)",
        "QEMU": _first_line("qemu-system-x86_64", "--version"),
        "rounds": str(size.rounds),
        "fio": f"{size.file_rounds} rounds, {size.fio_ms} ms a job, {file_io.FILE_MIB} MiB files on {_file_system()}",
        "per round": f"{size.starts} starts, {size.execs} execs, {size.stdout_mib} MiB through stdout",
    }


def _host(load_before: float) -> dict[str, str]:
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": f"{_cpu_model()}, {os.cpu_count()} online",
        "load average before and after": f"{load_before:.1f}, {os.getloadavg()[0]:.1f}",
        "host kernel": platform.release(),
        "Python": platform.python_version(),
        "containerd": _first_line("containerd", "--version"),
    }


def _file_system() -> str:
    return _first_line("stat", "--file-system", "--format=%T", str(PROJECT / ".build"))


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _version(program: Path, runtime: Runtime) -> str:
    """The version that the shim prints, in one line. runc's shim knows only `-v`."""
    command = [program, "--version" if runtime.has_vm else "-v"]
    return " ".join(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def _first_line(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()


if __name__ == "__main__":
    sys.exit(main())
