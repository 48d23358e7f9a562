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


def hierarchy(controller: str) -> Path:
    """The root of the v1 hierarchy that has the controller, of this enclosure."""
    return dict(cgroup_roots())[controller]


def members(directory: Path, file: str = "cgroup.procs") -> set[int]:
    return {int(line) for line in (directory / file).read_text().split()}


@contextlib.contextmanager
def pod_cgroup(name: str, **values: str) -> Iterator[str]:
    """A cgroup `/name` in every v1 hierarchy, as the kubelet makes one for a pod, with `memory__limit_in_bytes=...`."""
    made = []
    for controller, root in dict(cgroup_roots()).items():
        if controller in ("unified", "systemd"):
            continue
        directory = root / name
        directory.mkdir()
        made.append(directory)
        for inherited in ("cpuset.cpus", "cpuset.mems"):
            if controller == "cpuset":
                (directory / inherited).write_text((root / inherited).read_text())
        for key, value in values.items():
            if key.startswith(f"{controller}__"):
                (directory / key.replace("__", ".")).write_text(value)
    try:
        yield f"/{name}"
    finally:
        for directory in made:
            directory.rmdir()


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
