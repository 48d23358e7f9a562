"""The runtime under test, and what differs between a runtime with a VM and the reference one without."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from . import processes
from .processes import Process

DEFAULT = "io.containerd.pykata.v2"
CHOICE = "PYSHIM_TEST_RUNTIME"
VSOCK_CHOICE = "PYSHIM_TEST_VSOCK"
"""Set: the agents of all VMs are reached over vsock; `scripts/integration --vsock` sets it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """`name` as containerd takes it. Tests of a task's behaviour hold for every shim; the ones marked `vm` need a
    VM.
    """

    name: str

    @classmethod
    def chosen(cls) -> Runtime:
        return cls(name=os.environ.get(CHOICE, DEFAULT))

    @property
    def has_vm(self) -> bool:
        return not self.name.startswith("io.containerd.runc.")

    @property
    def has_vsock_program(self) -> bool:
        return self.has_vm and bool(os.environ.get(VSOCK_CHOICE))

    @property
    def binary(self) -> str:
        return "containerd-shim-" + "-".join(self.name.split(".")[-2:])

    def shims(self, container: str) -> list[Process]:
        """Daemons (not `start` or `delete` calls) that serve `container`."""
        found = processes.find(self.binary, "-id", container)
        return [p for p in found if p.command[-1] not in ("start", "delete") and container in p.command]

    def vmms(self, container: str) -> list[Process]:
        return [p for p in processes.find("qemu-system-", container) if "qemu-system-" in p.command[0]]

    def virtiofsds(self, container: str) -> list[Process]:
        return [p for p in processes.find("virtiofsd", container) if "virtiofsd" in p.command[0]]

    def vsock_programs(self, container: str) -> list[Process]:
        return [p for p in processes.find("vhost-device-vsock", container) if "vhost-device-vsock" in p.command[0]]

    def persisted(self, sandbox: str) -> Path:
        return Path("/run/vc/sbs", sandbox, "persist.json")
