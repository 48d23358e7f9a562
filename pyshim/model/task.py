"""containerd's Task API, decoded: the requests and replies of the pod, the states of a process, and the events."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec

from pyshim.model.ids import ContainerId, ExecId, HostPath

EXIT_KILLED = 137
EXIT_SANDBOX_LOST = 255


class Status(StrEnum):
    """A process's state, named as in containerd.v1.types.Status."""

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
# STOPPED is final. Exit status and time are set before a caller can see the state.
# A process that is killed before its start goes from CREATED to STOPPED: containerd kills created tasks.
# Source: the process states of containerd's runc shim.
TRANSITIONS: dict[Status, frozenset[Status]] = {
    Status.CREATED: frozenset({Status.RUNNING, Status.STOPPED}),
    Status.RUNNING: frozenset({Status.PAUSING, Status.STOPPED}),
    Status.PAUSING: frozenset({Status.PAUSED, Status.RUNNING, Status.STOPPED}),
    Status.PAUSED: frozenset({Status.RUNNING, Status.STOPPED}),
    Status.STOPPED: frozenset(),
    Status.UNKNOWN: frozenset(),
}


def can_become(now: Status, wanted: Status) -> bool:
    """`TRANSITIONS` allows the change."""
    return wanted in TRANSITIONS[now]


class RootfsMount(msgspec.Struct, frozen=True, kw_only=True):
    """One mount of `Create.rootfs`; `target` is relative to the rootfs, empty for the rootfs itself."""

    type: str
    source: str
    target: str
    options: tuple[str, ...]


class Stdio(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    """The FIFO path or log URI of each stream of a process; empty: no stream.

    `rename`: the field names of a sandbox's state file (`model/sandbox.py`).
    """

    stdin: str
    stdout: str
    stderr: str
    terminal: bool


class RuntimeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration that containerd's runtime handler names: a file, or the text itself."""

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
    """The OCI `process` object, from JSON."""


class ExitStatus(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    """`rename`: the field names of a sandbox's state file (`model/sandbox.py`)."""

    status: int
    """The exit code, or 128 + the number of the signal that ended the process."""
    exited_at_ns: int
    """Nanoseconds since the epoch."""


class ProcessState(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to State."""

    container_id: ContainerId
    exec_id: ExecId | None
    """None for the init process."""
    bundle: HostPath
    pid: int
    status: Status
    stdio: Stdio
    exit: ExitStatus | None

    @classmethod
    def being_created(cls, request: CreateTask, pid: int) -> "ProcessState":
        """The state of a container's init process during Create. `pid` is the VMM's; 0 before it runs.

        With a pid it is CREATED: cAdvisor gives up a pod whose state is UNKNOWN for three seconds, and containerd 2.4
        warns of each. Without one it is UNKNOWN, as cAdvisor would keep a pid of 0.
        """
        return cls(
            container_id=request.container_id,
            exec_id=None,
            bundle=request.bundle,
            pid=pid,
            status=Status.CREATED if pid else Status.UNKNOWN,
            stdio=request.stdio,
            exit=None,
        )


class ProcessInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One process in the answer to Pids."""

    pid: int
    exec_id: ExecId | None
    """None for the init process."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """This shim's identity, from containerd's command line."""

    namespace: str
    sandbox_id: str
    """The id of the pod's sandbox; without a pod, the container's."""
    containerd_ttrpc_address: str
    bundle: HostPath
    debug: bool
    options: RuntimeOptions | None = None
    """The runtime handler's options, for a sandbox of the Sandbox API, whose requests do not have them."""


class TaskCreated(msgspec.Struct, frozen=True, kw_only=True):
    container_id: ContainerId
    request: CreateTask
    pid: int


class TaskStarted(msgspec.Struct, frozen=True, kw_only=True):
    container_id: ContainerId
    pid: int


class TaskExited(msgspec.Struct, frozen=True, kw_only=True):
    container_id: ContainerId
    process_id: str
    """The exec id, or the container id for the init process."""
    pid: int
    exit: ExitStatus


class TaskDeleted(msgspec.Struct, frozen=True, kw_only=True):
    container_id: ContainerId
    pid: int
    exit: ExitStatus


class ExecAdded(msgspec.Struct, frozen=True, kw_only=True):
    container_id: ContainerId
    exec_id: ExecId


class ExecStarted(msgspec.Struct, frozen=True, kw_only=True):
    container_id: ContainerId
    exec_id: ExecId
    pid: int


class TaskPaused(msgspec.Struct, frozen=True, kw_only=True):
    container_id: ContainerId


class TaskResumed(msgspec.Struct, frozen=True, kw_only=True):
    container_id: ContainerId


class TaskOom(msgspec.Struct, frozen=True, kw_only=True):
    container_id: ContainerId


class RemoteVmLost(msgspec.Struct, frozen=True, kw_only=True):
    """The remote service no longer knows the started VM of sandbox `container_id`; the VM may still run."""

    container_id: ContainerId


TaskEvent = (
    TaskCreated
    | TaskStarted
    | TaskExited
    | TaskDeleted
    | ExecAdded
    | ExecStarted
    | TaskPaused
    | TaskResumed
    | TaskOom
    | RemoteVmLost
)
