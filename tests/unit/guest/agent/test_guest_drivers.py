"""The drivers that the guest's agent loads once it serves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from guest.agent.children import Children
from guest.agent.storage.hotplug import NICENESS, load_drivers


@pytest.fixture
def modprobe(tmp_path: Path) -> Path:
    """It notes its words, and waits for a line in the FIFO `go`."""
    os.mkfifo(tmp_path / "go")
    program = tmp_path / "modprobe"
    program.write_text(f'#!/bin/sh\necho "$@" >{tmp_path}/words\nread line <{tmp_path}/go\n')
    program.chmod(0o755)
    return program


def test_the_listed_modules_are_loaded_at_a_low_priority(tmp_path: Path, modprobe: Path) -> None:
    (tmp_path / "drivers").write_text("virtiofs\noverlay\n")

    child = load_drivers(Children(), listed=str(tmp_path / "drivers"), modprobe=str(modprobe))

    assert child is not None
    priority = os.getpriority(os.PRIO_PROCESS, child.pid)
    (tmp_path / "go").write_text("\n")
    os.waitpid(child.pid, 0)
    assert priority == NICENESS
    assert (tmp_path / "words").read_text() == "-a virtiofs overlay\n"


def test_an_image_without_the_list_has_its_drivers_loaded_by_others(tmp_path: Path, modprobe: Path) -> None:
    assert load_drivers(Children(), listed=str(tmp_path / "drivers"), modprobe=str(modprobe)) is None
