"""Task events, in the words of containerd.events; the publisher encodes and orders them."""

from pyshim.model.dataclasses import dataclass
from pyshim.model.ids import ContainerId, ExecId
from pyshim.model.task import CreateTask, ExitStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCreated:
    container_id: ContainerId
    request: CreateTask
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskStarted:
    container_id: ContainerId
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskExited:
    """`process_id` is the exec id, or the container id for the init process."""

    container_id: ContainerId
    process_id: str
    pid: int
    exit: ExitStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDeleted:
    container_id: ContainerId
    pid: int
    exit: ExitStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecAdded:
    container_id: ContainerId
    exec_id: ExecId


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecStarted:
    container_id: ContainerId
    exec_id: ExecId
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPaused:
    container_id: ContainerId


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResumed:
    container_id: ContainerId


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOom:
    container_id: ContainerId


TaskEvent = (
    TaskCreated | TaskStarted | TaskExited | TaskDeleted | ExecAdded | ExecStarted | TaskPaused | TaskResumed | TaskOom
)
