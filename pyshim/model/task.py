"""containerd's requests, decoded: the values that the task edge passes to the pod, and the states of a process."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec

from pyshim.model.ids import ContainerId, ExecId, HostPath


class Status(StrEnum):
    """A process's state, by the names of containerd.v1.types.Status."""

    UNKNOWN = "UNKNOWN"
    CREATED = "CREATED"
    RUNNING = "RUNNING"
    STOPPED = "STOPPED"
    PAUSED = "PAUSED"
    PAUSING = "PAUSING"


# Theory of operation of one process (an init or an exec):
#
#     CREATED --start--> RUNNING --pause--> PAUSING -> PAUSED --resume--> RUNNING
#        |                  |                            |
#        +--exit (killed)---+------------ exit ----------+--> STOPPED --delete--> (gone)
#
# STOPPED is a latch: exit status and time are final before a caller sees the state, which never changes again.
# A process killed before it was started goes from CREATED to STOPPED (containerd kills created tasks).
# Source: containerd's runc shim process states.
TRANSITIONS: dict[Status, frozenset[Status]] = {
    Status.CREATED: frozenset({Status.RUNNING, Status.STOPPED}),
    Status.RUNNING: frozenset({Status.PAUSING, Status.STOPPED}),
    Status.PAUSING: frozenset({Status.PAUSED, Status.RUNNING, Status.STOPPED}),
    Status.PAUSED: frozenset({Status.RUNNING, Status.STOPPED}),
    Status.STOPPED: frozenset(),
    Status.UNKNOWN: frozenset(),
}


def can_become(now: Status, wanted: Status) -> bool:
    return wanted in TRANSITIONS[now]


class RootfsMount(msgspec.Struct, frozen=True, kw_only=True):
    """One mount of `Create.rootfs`; `target` is relative to the rootfs, empty for the rootfs itself."""

    type: str
    source: str
    target: str
    options: tuple[str, ...]


class Stdio(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    """Targets of a process's streams: FIFO paths or log URIs; the empty string means no stream.

    `rename`: the state of a sandbox has it under these names (`model/snapshot.py`).
    """

    stdin: str
    stdout: str
    stderr: str
    terminal: bool


class RuntimeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """containerd's runtime options: which configuration file (or body) this runtime handler uses."""

    config_path: str
    config_body: bytes


class CreateTask(msgspec.Struct, frozen=True, kw_only=True):
    container_id: ContainerId
    bundle: HostPath
    rootfs: tuple[RootfsMount, ...]
    stdio: Stdio
    options: RuntimeOptions | None


class ExecTask(msgspec.Struct, frozen=True, kw_only=True):
    container_id: ContainerId
    exec_id: ExecId
    stdio: Stdio
    process: Mapping[str, Any]
    """The OCI `process` object as JSON gave it."""


class ExitStatus(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    """How a process ended: its code, or 128 + signal; `exited_at_ns` is wall-clock nanoseconds since the epoch.

    `rename`: the state of a sandbox has it under these names (`model/snapshot.py`).
    """

    status: int
    exited_at_ns: int


class ProcessState(msgspec.Struct, frozen=True, kw_only=True):
    """A State answer: the process as it is now."""

    container_id: ContainerId
    exec_id: ExecId | None
    bundle: HostPath
    pid: int
    status: Status
    stdio: Stdio
    exit: ExitStatus | None

    @classmethod
    def being_created(cls, request: CreateTask, pid: int) -> "ProcessState":
        """The init of a container under creation; `pid` is the VMM's, 0 before it runs."""
        return cls(
            container_id=request.container_id,
            exec_id=None,
            bundle=request.bundle,
            pid=pid,
            status=Status.UNKNOWN,
            stdio=request.stdio,
            exit=None,
        )


class ProcessInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One row of Pids; `exec_id` is None for the init process."""

    pid: int
    exec_id: ExecId | None


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """This shim's identity, from containerd's command line."""

    namespace: str
    sandbox_id: str
    """The grouping id: the sandbox for a pod, else the container's own id."""
    containerd_ttrpc_address: str
    bundle: HostPath
    debug: bool
    options: RuntimeOptions | None = None
    """Of a sandbox without a spec: those of its runtime handler, which no request brings."""
