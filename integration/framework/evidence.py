"""Evidence of a failed test: logs, console, persisted state, processes, mounts, stacks; one directory, its path printed
last.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from . import direct, processes
from .containerd import Containerd
from .leaks import cgroup_roots

_SHIM = "containerd-shim-"
_STATE_DIRECTORIES = ("/run/vc", "/run/kata-containers", "/run/containerd", "/run/peerpod")
_MAX_COPY_BYTES = 4 * 1024 * 1024


def collect(directory: Path, containerd: Containerd, since: int) -> Path:
    """Everything a person needs to understand a failure, in `directory`. One missing piece never stops the rest."""
    directory.mkdir(parents=True, exist_ok=True)
    pieces: dict[str, Callable[[], str]] = {
        "ps.txt": lambda: _run("ps", "axwwo", "pid,ppid,stat,etimes,args", "--forest"),
        "mountinfo.txt": lambda: Path("/proc/self/mountinfo").read_text(),
        "links.txt": lambda: _run("ip", "-details", "address"),
        "cgroups.txt": _cgroup_tree,
        "sockets.txt": lambda: Path("/proc/net/unix").read_text(),
        "tasks.txt": lambda: str(containerd.ctr("task", "ls", check=False)),
        "stacks.txt": _ask_shims_for_stacks,
        # After the stacks: shims write them to their log, which containerd copies into its own.
        "containerd-and-shim.log": lambda: containerd.shim_log(since),
        "direct-shims.log": _direct_shims_log,
    }
    for name, piece in pieces.items():
        try:
            text = piece()
        except (OSError, subprocess.SubprocessError, AssertionError) as exc:
            text = f"(not collected: {exc})"
        (directory / name).write_text(text)
    for source in _STATE_DIRECTORIES:
        _copy_regular_files(Path(source), directory / "state")
    return directory


def directory_for(root: Path, test: str) -> Path:
    return root / re.sub(r"[^A-Za-z0-9._-]+", "-", test).strip("-")[-120:]


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout


def _direct_shims_log() -> str:
    direct.take_logs()
    return direct.LOG.read_text(errors="replace")[-_MAX_COPY_BYTES:]


def _cgroup_tree() -> str:
    lines = []
    for name, root in cgroup_roots():
        for directory, _, _ in os.walk(root):
            procs = ""
            with contextlib.suppress(OSError):
                procs = Path(directory, "cgroup.procs").read_text().replace("\n", " ")
            lines.append(f"{name}:/{os.path.relpath(directory, root)}: {procs}")
    return "\n".join(lines)


def _ask_shims_for_stacks() -> str:
    """SIGUSR1 makes a shim write its tasks and open requests to its log."""
    asked = []
    for process in processes.running():
        is_zygote = process.command[-1:] == ("zygote",)  # the signal would end it, and tests that follow want it
        if not is_zygote and (process.name.startswith(_SHIM[:15]) or any(_SHIM in word for word in process.command)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)
                asked.append(str(process))
    time.sleep(0.5 if asked else 0)  # no reply exists to wait for
    return "\n".join(asked) or "(no shim was running)"


def _copy_regular_files(source: Path, target: Path) -> None:
    """Copies logs, persisted state, specs. Leaves out sockets, FIFOs and whatever is mounted (a container's files
    are its own).
    """
    for directory, names, files in os.walk(source):
        names[:] = [n for n in names if n != "rootfs" and not os.path.ismount(os.path.join(directory, n))]
        for name in files:
            path = Path(directory, name)
            with contextlib.suppress(OSError):
                info = path.lstat()
                if stat.S_ISREG(info.st_mode) and info.st_size <= _MAX_COPY_BYTES:
                    kept = target / path.relative_to("/")
                    kept.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(path, kept)
