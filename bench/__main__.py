"""`python -m bench`, inside an enclosure (`make bench` makes one): measure, print, write bench/results."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

from bench import chart, create_profile, file_io, memory, report, rounds, stub_pods, stubs
from bench.ground import GROUND, PROJECT, containerd_up
from bench.measures import Ground, Peer
from integration.framework import enclosure
from pyshim.host.probe import probe_host

RESULTS = PROJECT / "bench" / "results"
# Only a part of the table: the kept results stay as they are.
PART_RESULTS = PROJECT / ".build" / "bench"


def main() -> int:
    arguments = _arguments()
    if enclosure.MARK not in os.environ:
        print("bench: runs inside an enclosure (hint: `make bench`)", file=sys.stderr)
        return 2
    try:
        if arguments.output and not enclosure.outlives(arguments.output):
            raise ValueError(f"write results to {str(arguments.output)!r}: it is gone when the measuring has ended")
        peer = Peer.of(arguments.peer, arguments.peer_config) if arguments.peer else None
    except ValueError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    if arguments.only in ("", "files") and not file_io.FIO.exists():
        print(
            f"bench: find {str(file_io.FIO)!r}: not installed (hint: `make bench` or apt-get install fio)",
            file=sys.stderr,
        )
        return 2
    size = rounds.QUICK if arguments.quick else rounds.FULL
    if arguments.runs:
        size = replace(size, rounds=arguments.runs)
    load_before = os.getloadavg()[0]
    if arguments.only in ("memory", "create"):
        return _profile(arguments.only, size, arguments.ksm, arguments.output or PART_RESULTS, load_before)
    only_files = arguments.only == "files"
    with containerd_up(arguments.peer, peer) as ground:
        samples, of_idle = _measure(ground, size, only_files)
    found = report.rows(samples)
    facts = {**_facts(size, load_before), **of_idle}
    if only_files:
        facts["rounds"] = str(size.file_rounds)
        del facts["per round"]
    if peer is not None:
        facts["peer"] = str(arguments.peer)
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
    parser.set_defaults(only="")
    only = parser.add_mutually_exclusive_group()
    for part, what in (
        ("files", "the rates of fio"),
        ("memory", "where a forked shim's memory goes"),
        ("create", "where the time of Create goes"),
    ):
        told = f"only {what}; written to .build/bench"
        only.add_argument(f"--only-{part}", dest="only", action="store_const", const=part, help=told)
    parser.add_argument("--ksm", action="store_true", help="with --only-memory: while the kernel merges equal pages")
    parser.add_argument("--peer", type=Path, metavar="SHIM", help="path of another shim to measure beside ours")
    parser.add_argument("--peer-config", type=Path, metavar="FILE", help="the configuration the peer is given")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="default: bench/results; not in /run, /tmp or /dev/shm"
    )
    arguments = parser.parse_args()
    if arguments.runs < 0:
        parser.error(f"--runs {arguments.runs}: expected 1 or more")
    if arguments.only and (arguments.peer or arguments.runs):
        parser.error(f"--only-{arguments.only}: takes neither --peer nor --runs")
    if arguments.ksm and arguments.only != "memory":
        parser.error("--ksm: goes with --only-memory")
    return arguments


def _measure(ground: Ground, size: rounds.Size, only_files: bool) -> tuple[rounds.Samples, dict[str, str]]:
    """All samples, and in words what is measured once: how often an idle shim is woken, what many forked ones take."""
    started = time.monotonic()

    def progress(text: str) -> None:
        print(f"[{time.monotonic() - started:4.0f} s] {text}", flush=True)

    samples, of_idle = rounds.Samples(), {}
    if not only_files:
        stubbed = replace(ground, config=stubs.config(GROUND))
        samples = rounds.run(ground, stubbed, size, progress)
        with stub_pods.running(stubbed, 1) as (pid,):
            time.sleep(memory.SETTLE_S)  # it loads and writes what it had put off
            of_idle["idle wake-ups of a shim in 30 s"] = str(stub_pods.wakeups(pid, 30.0))
        progress("memory of many, merged")
        of_idle[f"{size.pods} forked shims, where the kernel merges equal pages (KSM)"] = _merged(stubbed, size.pods)
    rounds.run_file_io(ground, PROJECT / ".build", size, progress, samples)
    return samples, of_idle


def _merged(ground: Ground, pods: int) -> str:
    if not memory.KSM.exists():
        return "not measured: this kernel has no KSM"
    mib = memory.profile(ground, pods, ksm=True).many
    return f"PSS {mib[memory.ALL_PSS]:.1f} MiB each, zygote included; private {mib['private']:.1f} MiB"


def _profile(part: str, size: rounds.Size, ksm: bool, target: Path, load_before: float) -> int:
    """The exit code: 0, once the profile is printed and written."""
    found: memory.Profile | create_profile.Found
    with containerd_up() as plain:
        ground = replace(plain, config=stubs.config(GROUND))
        if part == "memory":
            found = memory.profile(ground, size.pods, ksm=ksm)
            text = memory.as_text(found)
        else:
            found = create_profile.profile(ground, size.profiled)
            text = create_profile.as_text(found)
    facts = _facts(size, load_before)
    if part == "memory":
        facts["equal pages"] = "merged by the kernel" if ksm else "left as they are"
    print(text)
    target.mkdir(parents=True, exist_ok=True)
    file = target / f"{part}.json"
    file.write_text(json.dumps({"facts": facts, **asdict(found)}, indent=1) + "\n")
    print(f"written: {file}")
    return 0


def _facts(size: rounds.Size, load_before: float) -> dict[str, str]:
    facts = probe_host()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": f"{_cpu_model()}, {os.cpu_count()} online",
        "load average before and after": f"{load_before:.1f}, {os.getloadavg()[0]:.1f}",
        "host kernel": platform.release(),
        "accelerator": "kvm" if facts.kvm_usable else "tcg (emulation)",
        "Python": platform.python_version(),
        "QEMU": _first_line("qemu-system-x86_64", "--version"),
        "containerd": _first_line("containerd", "--version"),
        "rounds": str(size.rounds),
        "fio": f"{size.file_rounds} rounds, {size.fio_ms} ms a job, {file_io.FILE_MIB} MiB files on {_file_system()}",
        "per round": f"{size.starts} starts, {size.execs} execs, {size.stdout_mib} MiB through stdout",
    }


def _file_system() -> str:
    return _first_line("stat", "--file-system", "--format=%T", str(PROJECT / ".build"))


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _first_line(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()


if __name__ == "__main__":
    sys.exit(main())
