"""The shims of a run are forked by a zygote or executed, and each is checked to be made as it was meant to.

Every file of tests has its shims in one mode. In an ordinary run some files have forked ones, so that each run covers
both; PYSHIM_TEST_SHIMS, set by `scripts/integration --forked` and `--executed`, gives one mode to all. A shim's log
says who made it; that it is right is seen by the kernel's flags of those that live.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from . import direct, processes
from .waiting import PATIENCE_S, eventually

CHOICE = "PYSHIM_TEST_SHIMS"
ALWAYS_FORKED, ALWAYS_EXECUTED = "test_zygote", "test_growth"
FORKED_FILES = frozenset(
    {
        *("test_cgroups", "test_cleanup", "test_crash", "test_cri_life", "test_cri_many", "test_cri_restart"),
        *("test_devices", "test_exec", "test_lifecycle", "test_network", "test_observation", "test_remote_failures"),
        *("test_resizing", "test_restart", "test_streams", "test_volumes", ALWAYS_FORKED),
    }
)
"""The files with forked shims in an ordinary run: each has a neighbour, with executed ones, that asks for the like.

A pod's life is test_cri_life's and test_task_api's, what it says test_streams' and test_cri_io's, its end by force
test_crash's and test_soak's, its network test_network's and test_cri_network's, its volumes test_volumes' and
test_disks'.
"""
TOLD_WITHIN_S = PATIENCE_S
"""containerd copies a shim's log while the shim goes on."""
_STARTED = re.compile(
    r'msg="shim started" sandbox=(?P<sandbox>"[^"]*"|\S+) .*?\bpid=(?P<pid>\d+) made_by=(?P<mode>\w+)'
)


class Mode(StrEnum):
    """As a shim's log spells it."""

    FORKED = "fork"
    EXECUTED = "exec"

    @classmethod
    def of_file(cls, name: str) -> Mode:
        """The mode that is meant for the tests of the file `name`, without its suffix."""
        if name == ALWAYS_EXECUTED:
            return cls.EXECUTED
        forked = {"forked": True, "executed": False, "": name in FORKED_FILES}
        return cls.FORKED if name == ALWAYS_FORKED or forked[os.environ.get(CHOICE, "")] else cls.EXECUTED


@dataclass(frozen=True, slots=True)
class Start:
    """One shim has begun to serve."""

    sandbox: str
    pid: int
    mode: Mode


def starts_in(log: str) -> Iterator[Start]:
    """The starts in the lines of shims' logs."""
    for found in _STARTED.finditer(log):
        yield Start(found["sandbox"].strip('"'), int(found["pid"]), Mode(found["mode"]))


class Starts:
    """The starts of all shims that write to `logs`, and of those called by hand, each seen once."""

    def __init__(self, *logs: Path) -> None:
        self._logs = (*logs, direct.LOG)
        self._read: dict[Path, int] = {}
        self.seen: list[Start] = []

    def new(self) -> Sequence[Start]:
        """Those since the last call."""
        direct.take_logs()
        before = len(self.seen)
        for path in self._logs:
            if path.exists():
                with path.open("rb") as log:
                    log.seek(self._read.get(path, 0))
                    lines = log.read().rpartition(b"\n")[0]
                self._read[path] = self._read.get(path, 0) + len(lines)
                self.seen += starts_in(lines.decode(errors="replace"))
        return self.seen[before:]

    def require(self, meant: Mode, *, executed_because: str = "") -> None:
        """Raises AssertionError unless each new start was as `meant`, or some were executed where there is a reason."""
        new = [*self.new()]
        if executed_because and meant is Mode.FORKED:

            def some_executed() -> bool:
                new.extend(self.new())
                return any(start.mode is Mode.EXECUTED for start in new)

            what = f"a shim is executed since {executed_because}"
            eventually(some_executed, what=lambda: f"{what}, of {new}", within_s=TOLD_WITHIN_S)
        else:
            others = [start for start in new if start.mode is not meant]
            assert not others, f"made by {meant}, each shim of this test; not so: {others}"

    def require_truth(self) -> None:
        """Raises AssertionError unless the logs have every shim that lives, made as the kernel shows it."""
        eventually(self._confirmed, what="the living shims' logs say who made them, as the kernel shows it")

    def _confirmed(self) -> bool:
        self.new()
        last = {start.pid: start.mode for start in self.seen}
        living = [p for p in processes.find("containerd-shim-") if p.command[-1] == "serve" and p.state not in "ZX"]
        return all(last.get(p.pid) is (Mode.FORKED if p.never_executed else Mode.EXECUTED) for p in living)
