"""The play the zygote gives before it forks: it succeeds, and nothing of it stays."""

import asyncio
import logging
import os
import signal
import threading
from pathlib import Path

import pytest

from pyshim import rehearsal


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
