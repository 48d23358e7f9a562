"""`make peers WHAT=docker`: verbs, restarts of dockerd and Compose, with runc and with pyshim, in one table.

Runs in an enclosure, after `python -m integration.docker.packages`. `--warm` continues VMs from a template instead of
booting them, `--rounds N` sets the number of Compose rounds, and words choose rows that contain one of them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from integration import records
from integration.framework import boots, enclosure
from integration.framework.containerd import Containerd, missing_programs, remove_daemon_files
from integration.framework.daemon import Directories
from integration.framework.leaks import HostState, assert_nothing_left
from integration.framework.releases import PROJECT

from . import compose, packages
from .engine import PYSHIM, RUNC, Engine, engine
from .restarts import PHASES
from .verbs import VERBS, Scene

GROUND = Path("/run/pyshim-docker")
LOG = PROJECT / ".build" / "docker-containerd.log"
"""containerd's log of the last run, in which the shims' lines are."""
_PORTS = {RUNC: 18080, PYSHIM: 18081}


def observed(look: Callable[[], str]) -> str:
    """What a look showed, on one line; a failure is what it showed, too."""
    try:
        return look()
    except (AssertionError, ValueError, OSError) as error:
        return f"failed: {' '.join(str(error).split())[:600]}"


def rows(made: Engine, words: list[str]) -> list[tuple[str, str, str, str]]:
    """(verb, with runc, with pyshim, why they may differ) of each row that has one of `words`, or of all."""
    scenes = [Scene(docker=made.docker, runtime=runtime, ground=GROUND, port=port) for runtime, port in _PORTS.items()]
    found = []
    chosen = [row for row in VERBS if not words or any(word in row.name for word in words)]
    for row in chosen:
        shown = [observed(partial(row.look, scene)) for scene in scenes]
        found.append((row.name, shown[0], shown[1], row.differs))
        say(*found[-1])
    for phase, act in PHASES.items():
        name = f"dockerd restarted: {phase}"
        if not words or any(word in name for word in words):
            shown = [observed(partial(act, made, scene)) for scene in scenes]
            found.append((name, shown[0], shown[1], ""))
            say(*found[-1])
    return found


def say(name: str, runc: str, pyshim: str, differs: str) -> None:
    verdict = "equal" if runc == pyshim else f"differs: {differs}" if differs else "DIFFERS"
    print(f"{name}\n  runc    {runc.replace(RUNC, 'R')}\n  pyshim  {pyshim}\n  {verdict}", flush=True)


def main() -> int:
    """0 if all rows are equal but those that say why, and Compose left nothing."""
    parser = argparse.ArgumentParser(prog="python -m integration.docker")
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--rounds", type=int, help="of Compose; default: 20, with words 0")
    parser.add_argument("words", nargs="*")
    asked = parser.parse_args()
    rounds = asked.rounds if asked.rounds is not None else 0 if asked.words else 20
    if enclosure.MARK not in os.environ:
        print("docker: run it with `make peers WHAT=docker`", file=sys.stderr)
        return 2
    if missing := missing_programs("iptables", "runc"):
        print(f"docker: needs {', '.join(missing)}", file=sys.stderr)
        return 2
    GROUND.mkdir()
    if asked.warm:
        boots.Template(GROUND / "template").bind()
    before = HostState.look((GROUND,))
    started = time.monotonic()
    daemon = Containerd(
        Directories(root=GROUND / "containerd", state=Path("/run/containerd")), binaries=PROJECT / "bin"
    )
    with daemon, engine(daemon, packages.programs(), GROUND / "engine") as made:
        version = made.docker("version", "--format", "Docker Engine {{.Server.Version}}").out.strip()
        print(version, flush=True)
        table = rows(made, asked.words)
        failed = [name for name, runc, pyshim, differs in table if runc != pyshim and not differs]
        try:
            if rounds:
                compose.run_rounds(made.docker, GROUND, PYSHIM, rounds, GROUND)
        finally:
            shutil.copyfile(daemon.directories.log, LOG)
    remove_daemon_files(daemon.directories)
    equal = sum(runc == pyshim for _, runc, pyshim, _ in table)
    documented = len(table) - equal - len(failed)
    print(f"\n{len(table)} rows: {equal} equal, {documented} differ as documented, {len(failed)} else")
    print("\n".join(f"  {name}" for name in failed))
    print(f"Compose rounds: {rounds}; {time.monotonic() - started:.0f} s")
    assert_nothing_left(before, (GROUND,))
    if not asked.words:
        records.add("Docker's verbs", f"{version}: {equal} of {len(table)} as runc, {documented} documented")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
