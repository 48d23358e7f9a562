"""Failures on the daemon's side of the fork, and the two hand-overs of the environment: cgroup, OOM score."""

import os
import socket
from pathlib import Path

import pytest

from pyshim.start.daemonize import join_cgroup, spawn
from pyshim.start.errors import BootstrapError


def children() -> str:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text()


def spawn_failing(tmp_path: Path, command: list[str], cgroup: str = "") -> str:
    before, fds = children(), len(os.listdir("/proc/self/fd"))
    with socket.socket(socket.AF_UNIX) as listener, pytest.raises(BootstrapError) as caught:
        spawn(
            command, environment={}, listening_fd=listener.fileno(), log_path=str(tmp_path / "log"), shim_cgroup=cgroup
        )
    assert children() == before
    assert len(os.listdir("/proc/self/fd")) == fds
    return str(caught.value)


def test_program_that_cannot_be_executed_is_reported_and_reaped(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")

    assert (
        spawn_failing(tmp_path, [missing, "serve"]) == f"execute daemon {missing!r}: ENOENT (no such file or directory)"
    )


def test_shim_cgroup_that_does_not_exist_is_reported_and_the_child_reaped(tmp_path: Path) -> None:
    text = spawn_failing(tmp_path, ["/bin/true"], cgroup="/no/such/cgroup")

    assert text == "join cgroup '/no/such/cgroup': no such cgroup below '/sys/fs/cgroup'"


def test_unified_hierarchy_is_joined_once(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpu memory")
    (tmp_path / "shims").mkdir()
    (tmp_path / "shims" / "cgroup.procs").write_text("")

    join_cgroup("/shims", str(tmp_path))

    assert (tmp_path / "shims" / "cgroup.procs").read_text() == "0"


def test_every_v1_hierarchy_that_has_the_cgroup_is_joined(tmp_path: Path) -> None:
    for controller in ("cpu", "memory", "pids"):
        (tmp_path / controller / "shims").mkdir(parents=True)
    for controller in ("cpu", "memory"):
        (tmp_path / controller / "shims" / "cgroup.procs").write_text("")

    join_cgroup("shims", str(tmp_path))

    assert [(tmp_path / name / "shims" / "cgroup.procs").read_text() for name in ("cpu", "memory")] == ["0", "0"]
    assert not (tmp_path / "pids" / "shims" / "cgroup.procs").exists()
