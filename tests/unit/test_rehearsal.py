"""The play the zygote gives before it forks: it succeeds, and nothing of it stays."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pyshim import rehearsal

REPOSITORY = Path(__file__).parents[2]


def state() -> tuple[object, ...]:
    root = logging.getLogger()
    return (
        sorted(os.listdir("/proc/self/fd")),
        threading.active_count(),
        root.level,
        list(root.handlers),
        [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)],
        dict(os.environ),
    )


def test_a_rehearsal_succeeds_and_leaves_nothing(tmp_path: Path) -> None:
    before = state()

    rehearsal.rehearse(str(tmp_path), plays=2)

    assert state() == before
    assert list(tmp_path.iterdir()) == []
    assert asyncio._get_running_loop() is None


def test_a_rehearsal_that_fails_leaves_nothing_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = state()

    def broken() -> None:
        raise ValueError("no such host")

    monkeypatch.setattr(rehearsal, "probe_host", broken)
    with pytest.raises(ValueError, match="no such host"):
        rehearsal.rehearse(str(tmp_path), plays=1)

    assert state() == before
    assert list(tmp_path.iterdir()) == []


def test_a_shim_uses_no_module_that_was_not_there_before_the_fork(tmp_path: Path) -> None:
    """What the play imports late is on the list of what the zygote imports at once."""
    script = (
        "import importlib, sys; sys.path += sys.argv[2:]\n"
        "from pyshim.zygote import SHIM_MODULES\n"
        "for name in SHIM_MODULES: importlib.import_module(name)\n"
        "from pyshim import rehearsal\n"
        "before = set(sys.modules)\n"
        "rehearsal.rehearse(sys.argv[1], 1)\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    packages = [path for path in sys.path if path.endswith("-packages")]
    command = [sys.executable, "-I", "-S", "-c", script, str(tmp_path), str(REPOSITORY), *packages]

    late = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.split()

    assert late == []
