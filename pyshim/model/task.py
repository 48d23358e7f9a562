"""What containerd asks for, decoded: the values the task edge hands to the sandbox room."""

from collections.abc import Mapping
from enum import IntEnum
from typing import Any

from pyshim.model.dataclasses import dataclass
from pyshim.model.ids import ContainerId, ExecId, HostPath


class Status(IntEnum):
    """A process's state; the numbers are containerd.v1.types.Status."""

    UNKNOWN = 0
    CREATED = 1
    RUNNING = 2
    STOPPED = 3
    PAUSED = 4
    PAUSING = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class RootfsMount:
    """One mount of `Create.rootfs`; `target` is relative to the rootfs, empty for the rootfs itself."""

    type: str
    source: str
    target: str
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stdio:
    """Where a process's streams go: FIFO paths or log URIs; the empty string means no stream."""

    stdin: str
    stdout: str
    stderr: str
    terminal: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeOptions:
    """containerd's runtime options: which configuration file (or body) this runtime handler uses."""

    config_path: str
    config_body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateTask:
    container_id: ContainerId
    bundle: HostPath
    rootfs: tuple[RootfsMount, ...]
    stdio: Stdio
    options: RuntimeOptions | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecTask:
    container_id: ContainerId
    exec_id: ExecId
    stdio: Stdio
    process: Mapping[str, Any]
    """The OCI `process` object as JSON gave it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitStatus:
    """How a process ended: its code, or 128 + signal; `exited_at_ns` is wall-clock nanoseconds since the epoch."""

    status: int
    exited_at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessState:
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
        """Of the init of a container that is on its way; `pid` is the VMM's, 0 before there is one."""
        return cls(
            container_id=request.container_id,
            exec_id=None,
            bundle=request.bundle,
            pid=pid,
            status=Status.UNKNOWN,
            stdio=request.stdio,
            exit=None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessInfo:
    """One row of Pids; `exec_id` is None for the init process."""

    pid: int
    exec_id: ExecId | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who this shim is, as given on its command line by containerd."""

    namespace: str
    sandbox_id: str
    """The grouping id: the sandbox for a pod, else the container's own id."""
    containerd_address: str
    containerd_ttrpc_address: str
    publish_binary: str
    bundle: HostPath
    debug: bool
