"""Task events, named as in containerd.events. The publisher encodes them and sends them in order."""

import msgspec

from pyshim.model.ids import ContainerId, ExecId
from pyshim.model.task import CreateTask, ExitStatus


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
