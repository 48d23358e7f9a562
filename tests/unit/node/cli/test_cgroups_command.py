"""`pyshim status --cgroups`: what is recorded, and what the kernel says of it now."""

import json
from pathlib import Path
from typing import Any

import pytest

from pyshim.node.cli.command import run
from tests.unit.state import states

RECORD: dict[str, Any] = {
    "Mode": "v1",
    "SandboxCgroupOnly": False,
    "Unit": "",
    "Groups": [
        {"Role": "sandbox", "Path": "/pod1/c1", "Roots": ["/nowhere"]},
        {"Role": "overhead", "Path": "/kata_overhead/c1", "Roots": ["/nowhere"]},
        {"Role": "devices", "Path": "/kata_overhead/c1/vmm", "Roots": ["/nowhere"]},
    ],
    "Members": {"shim": "overhead", "virtiofsd": "overhead", "vmm": "overhead", "vcpus": "sandbox"},
    "Pids": {},
    "VcpuThreads": [],
    "Settings": [
        {"Role": "sandbox", "File": "cpuset.cpus", "Value": "1", "Source": "union of the containers' cpus"},
        {"Role": "devices", "File": "devices.allow", "Value": "c 1:3 rwm", "Source": "null"},
    ],
    "Pinned": {"1": 3},
    "Pinning": "1 vCPUs on a CPU each",
    "Notes": ["guest RAM counts in the overhead cgroup"],
}


def _keep(root: Path, cgroups: dict[str, Any]) -> list[str]:
    states.save(root, "c1", cgroups=cgroups)
    return ["status", "--cgroups", "c1", "--state-dir", str(root)]


def test_everything_recorded_is_shown_and_what_is_gone_is_said_to_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(_keep(tmp_path, RECORD)) == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "sandbox c1: cgroup v1, vCPUs and overhead apart"
    assert "sandbox   /pod1/c1   counts as the pod's   (is gone)" in lines
    assert "    set       cpuset.cpus = 1   union of the containers' cpus" in lines
    assert "    allowed   c 1:3 rwm (null)" in lines
    assert "pinning   vCPU 1 on CPU 3" in lines
    assert any(line.startswith("outside   shim, virtiofsd, vmm") for line in lines)
    assert lines[-1] == "note      guest RAM counts in the overhead cgroup"


def test_programs_get_the_record_with_what_the_kernel_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*_keep(tmp_path, RECORD), "--json"]) == 0

    shown = json.loads(capsys.readouterr().out)
    assert [(group["Role"], group["There"], group["Processes"]) for group in shown["Groups"]] == [
        ("sandbox", False, {}),
        ("overhead", False, {}),
        ("devices", False, {}),
    ]


def test_a_host_without_cgroups_has_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(_keep(tmp_path, {"Mode": "none", "Notes": ["this host has no cgroups mounted"]})) == 0

    assert "note      this host has no cgroups mounted" in capsys.readouterr().out


def test_a_sandbox_without_a_record_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(_keep(tmp_path, {})) == 1

    assert "show cgroups of sandbox 'c1': none are recorded yet" in capsys.readouterr().err
