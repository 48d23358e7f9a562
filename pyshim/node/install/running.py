"""pyshim's units and processes on this node, and the lock that excludes a second installation."""

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise

from pyshim.host.fds import OwnedFd
from pyshim.host.processes.identity import arguments, find_by_argument
from pyshim.model.errors import FailedPrecondition

_COMMAND_S = 60.0
_LOCK_PAUSE_S = 0.1
"""Seconds between two attempts."""
_UNITS = ("pyshim-cleanup.timer", "pyshim-zygote.service")
_SERVICES = ("pyshim-monitor.service", "pyshim-nri.service", "pyshim-webhook.service")
"""Units that an operator may have installed."""
_SYSTEMD = "/run/systemd/system"
"""A directory that exists if systemd is the node's init. Source: sd_booted(3)."""


def reload_units() -> None:
    """systemd has read the present unit files. Nothing happens without systemd."""
    if os.path.isdir(_SYSTEMD):
        run_command(["systemctl", "daemon-reload"])


def restart_units(*, also_stopped: bool) -> None:
    """Running units are restarted with the present files, with `also_stopped` our own stopped units as well.

    A unit without a file is stopped. A restarted zygote runs the present release; forks of the former one go on.
    """
    for unit, (has_file, runs) in _units(_SERVICES).items():
        if has_file and runs:
            run_command(["systemctl", "restart", unit])
    for unit, (has_file, runs) in _units(_UNITS).items():
        if has_file:
            run_command(["systemctl", "restart" if also_stopped else "try-restart", unit])
        elif runs:
            run_command(["systemctl", "stop", unit])


def stop_units() -> None:
    """Stops our own units."""
    for unit, (_, runs) in _units(_UNITS).items():
        if runs:
            run_command(["systemctl", "stop", unit])


def _units(names: tuple[str, ...]) -> dict[str, tuple[bool, bool]]:
    """By unit: it has a file; it runs. systemctl fails for a unit without a file."""
    if not os.path.isdir(_SYSTEMD):
        return {}
    found = {}
    for unit in names:
        said = run_command(["systemctl", "show", "--property=LoadState,ActiveState", unit]).splitlines()
        found[unit] = (
            "LoadState=not-found" not in said,
            not {"ActiveState=inactive", "ActiveState=failed"} & set(said),
        )
    return found


def processes_of(directory: str) -> tuple[int, ...]:
    """Processes whose command line has a path below `directory`: shims and VMs of that release."""
    return tuple(process.pid for process in find_by_argument(f"{directory}/"))


def is_zygote(pid: int) -> bool:
    """The process is a zygote. Its forks have other command lines."""
    return arguments(pid)[-1:] == ("zygote",)


def operators_command(pid: int) -> str:
    """The words of a process that runs a verb of `pyshim`, such as the node's monitor; else empty."""
    words = arguments(pid)
    return " ".join(words[words.index("-m") + 1 :]) if ("-m", "pyshim") in pairwise(words) else ""


def end(pid: int, number: int) -> None:
    """The signal was sent, unless the process has ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


@contextmanager
def lock(root: str, prefix: str, wait_s: float = 0.0) -> Iterator[None]:
    """No other `pyshim` changes the installation in `prefix` within the block; another one may take `wait_s` to end.

    The lock is a file beside the prefix, which names its owner and is gone after the block. Raises FailedPrecondition
    naming the owner.
    """
    path = f"{root.rstrip('/')}{os.path.dirname(prefix).rstrip('/')}/.{os.path.basename(prefix)}.lock"
    os.makedirs(os.path.dirname(path), exist_ok=True)
    end_s = time.monotonic() + wait_s
    while (held := _locked(path)) is None:
        if time.monotonic() >= end_s:
            hint = "wait for it with --wait SECONDS"
            raise FailedPrecondition(f"change the installation in '{prefix}': {_owner(path)} does so (hint: {hint})")
        time.sleep(_LOCK_PAUSE_S)
    with held:
        try:
            yield
        finally:
            os.unlink(path)


def _locked(path: str) -> OwnedFd | None:
    """The locked file with our name in it; None while another process has it."""
    file = OwnedFd(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
            raise FileNotFoundError  # its owner removed it between our two calls
    except (BlockingIOError, FileNotFoundError):
        file.close()
        return None
    os.ftruncate(file.fileno(), 0)
    os.pwrite(file.fileno(), f"{os.getpid()} {' '.join(sys.argv[1:3])}".encode(errors="replace"), 0)
    return file


def _owner(path: str) -> str:
    with suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        pid, _, words = file.read(200).partition(" ")
        if pid:
            return f"'pyshim {words}' as process {pid}"
    return "another 'pyshim'"


def run_command(command: list[str], limit_s: float = _COMMAND_S) -> str:
    """The stdout of the command. Raises FailedPrecondition with the end of its stderr."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise FailedPrecondition(f"run '{' '.join(command)}': {error}") from error
    if done.returncode != 0:
        raise FailedPrecondition(
            f"run '{' '.join(command)}': exit code {done.returncode}: {done.stderr.strip()[-1500:]}"
        )
    return done.stdout
