"""The play the zygote gives before it forks: it succeeds, and nothing of it stays."""

import asyncio
import logging
import os
import signal
import threading
from pathlib import Path

import pytest

from pyshim import rehearsal
from pyshim.model.host_facts import HostFacts


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

    marks: list[int] = []
    rehearsal.rehearse(str(tmp_path), plays=2, mark=lambda: marks.append(len(list(tmp_path.glob("*/state/*")))))

    assert state() == before
    assert marks == [0, 1, 0, 1], "a pod's state is there when Start has ended"
    assert list(tmp_path.iterdir()) == []
    assert asyncio._get_running_loop() is None


def test_a_node_that_is_busy_with_other_things_for_a_minute_does_not_end_the_rehearsal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zygotes begin when everything else of a node does."""
    probe, time, late_s = rehearsal.probe_host, asyncio.SelectorEventLoop.time, [0.0]

    def slow() -> HostFacts:
        late_s[0] = 60.0
        return probe()

    monkeypatch.setattr(asyncio.SelectorEventLoop, "time", lambda loop: time(loop) + late_s[0])
    monkeypatch.setattr(rehearsal, "probe_host", slow)

    rehearsal.rehearse(str(tmp_path), plays=1)


def test_a_rehearsal_that_fails_leaves_nothing_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = state()

    def broken() -> None:
        raise ValueError("no such host")

    monkeypatch.setattr(rehearsal, "probe_host", broken)
    with pytest.raises(ValueError, match="no such host"):
        rehearsal.rehearse(str(tmp_path), plays=1)

    assert state() == before
    assert list(tmp_path.iterdir()) == []
