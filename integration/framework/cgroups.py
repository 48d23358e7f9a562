"""Host cgroups as the kernel shows them, and a sandbox's own as its record names them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .leaks import cgroup_roots

STATES = Path("/run/vc/sbs")
_ROOT = Path("/sys/fs/cgroup")


def is_v2() -> bool:
    """Version 2 only. A machine with both has its controllers in version 1."""
    return (_ROOT / "cgroup.controllers").exists()


def has(controller: str) -> bool:
    if is_v2():
        return controller in (_ROOT / "cgroup.controllers").read_text().split()
    return controller in dict(cgroup_roots())


def hierarchy(controller: str) -> Path:
    """The root of the hierarchy that has the controller, of this enclosure."""
    return _ROOT if is_v2() else dict(cgroup_roots())[controller]


def members(directory: Path) -> set[int]:
    return _numbers(directory / "cgroup.procs")


def thread_ids(directory: Path) -> set[int]:
    return _numbers(directory / ("cgroup.threads" if is_v2() else "tasks"))


def _numbers(file: Path) -> set[int]:
    return {int(line) for line in file.read_text().split()}


@contextlib.contextmanager
def pod_cgroup(name: str, *, cpus: str = "") -> Iterator[str]:
    """A cgroup `/name` in every hierarchy, as the kubelet makes one for a pod; `cpus` is its cpuset."""
    roots = {_ROOT} if is_v2() else {root for key, root in cgroup_roots() if key not in ("unified", "systemd")}
    for root in roots:
        (root / name).mkdir()
    cpuset = hierarchy("cpuset")
    if is_v2():
        controllers = (_ROOT / name / "cgroup.controllers").read_text().split()
        (_ROOT / name / "cgroup.subtree_control").write_text(" ".join(f"+{each}" for each in controllers))
    else:
        for inherited in ("cpuset.cpus", "cpuset.mems"):
            (cpuset / name / inherited).write_text((cpuset / inherited).read_text())
    if cpus:
        (cpuset / name / "cpuset.cpus").write_text(cpus)
    try:
        yield f"/{name}"
    finally:
        for root in roots:
            (root / name).rmdir()


@dataclass(frozen=True, slots=True)
class SandboxCgroups:
    """Of a running sandbox."""

    id: str

    @property
    def state(self) -> Any:
        return json.loads((STATES / self.id / "persist.json").read_text())

    @property
    def record(self) -> Any:
        return self.state["Pyshim"]["Snapshot"]["Cgroups"]

    @property
    def shim(self) -> int:
        return int(self.state["Pyshim"]["Shim"]["Pid"])

    @property
    def vmm(self) -> int:
        return int(self.record["Pids"]["vmm"])

    @property
    def virtiofsd(self) -> int:
        return int(self.record["Pids"]["virtiofsd"])

    @property
    def vcpu_threads(self) -> set[int]:
        return set(self.record["VcpuThreads"])

    def path(self, role: str) -> str:
        return str(next(group["Path"] for group in self.record["Groups"] if group["Role"] == role))

    def directory(self, role: str, controller: str) -> Path:
        return hierarchy(controller) / self.path(role).lstrip("/")
