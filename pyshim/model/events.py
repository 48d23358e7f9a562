"""Task events, in the words of containerd.events; the publisher encodes and orders them."""

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
    """`process_id` is the exec id, or the container id for the init process."""

    container_id: ContainerId
    process_id: str
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
    """The service has forgotten the started VM of sandbox `container_id`; the VM may run on."""

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
