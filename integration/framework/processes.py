"""Processes of the enclosure, read from /proc. The pid namespace shows only the run's own, so nothing has to be
guessed.
"""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path

# Source: linux/sched.h; proc(5), stat, flags.
_PF_FORKNOEXEC = 0x40


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    pid: int
    parent: int
    name: str
    command: tuple[str, ...]
    state: str
    never_executed: bool
    """It was forked and is what it was then: it runs its parent's program."""

    def __str__(self) -> str:
        return f"{self.pid} {' '.join(self.command) or f'[{self.name}] {self.state}'}"


def read(pid: int) -> Process | None:
    """The process, or None when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    name, rest = stat[stat.index("(") + 1 :].rsplit(")", 1)
    state, parent, _, _, _, _, flags = rest.split()[:7]
    never = bool(int(flags) & _PF_FORKNOEXEC)
    words = tuple(word.decode(errors="replace") for word in command.rstrip(b"\0").split(b"\0")) if command else ()
    return Process(pid=pid, parent=int(parent), name=name, command=words, state=state, never_executed=never)


def cpu_ticks(pid: int) -> tuple[int, int]:
    """CPU time so far, in user space and in the kernel. Source: proc(5), stat, utime and stime."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]), int(fields[12])


def running() -> list[Process]:
    """All processes in the pid namespace, by pid."""
    found = (read(int(entry)) for entry in sorted(filter(str.isdigit, os.listdir("/proc")), key=int))
    return [process for process in found if process]


def find(*words: str) -> list[Process]:
    """Processes whose command line contains every one of `words` (as a substring of the joined line)."""
    return [p for p in running() if p.command and all(word in " ".join(p.command) for word in words)]


def descendants(pid: int) -> list[Process]:
    everyone = running()
    family = {pid}
    found: list[Process] = []
    while True:
        more = [p for p in everyone if p.parent in family and p.pid not in family]
        if not more:
            return found
        found += more
        family |= {p.pid for p in more}


def is_alive(pid: int) -> bool:
    process = read(pid)
    return process is not None and process.state not in "ZX"


def kill_sandbox(sandbox: str) -> list[Process]:
    """The VMM and the shims of a sandbox that did not end by itself have got SIGKILL: who they were.

    containerd calls the shim's `delete` when it sees its shim gone, which removes what they had made.
    """
    name = f"sandbox-{sandbox}"
    found = [p for p in running() if name in (word.split(",")[0] for word in p.command)]
    found += [p for p in find("containerd-shim-") if sandbox in p.command]
    for process in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    return found
