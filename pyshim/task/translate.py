"""containerd's Task messages to model values and back, field by field. Bad input is refused; nothing is decided here.

One set of generated classes serves both generations of the API: containerd.task.v3 has the messages of
containerd.task.v2 under another package, and the package is not on the wire.
"""

import logging
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple, TypeVar

from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import DecodeError, Message
from google.protobuf.timestamp_pb2 import Timestamp

from protos.containerd import runc_options_pb2, runtimeoptions_pb2, sandbox_pb2
from protos.containerd import task_v2_pb2 as pb
from pyshim.model.decoding import json_value
from pyshim.model.errors import InvalidArgument
from pyshim.model.ids import ContainerId, ExecId, HostPath, checked_id
from pyshim.model.task import (
    CreateTask,
    ExecTask,
    ExitStatus,
    ProcessInfo,
    ProcessState,
    RootfsMount,
    RuntimeOptions,
    Stdio,
)

log = logging.getLogger(__name__)

_RUNTIME_OPTIONS = "runtimeoptions.v1.Options"
_PROCESS = "opencontainers/runtime-spec/1/Process"
_LINUX_RESOURCES = "opencontainers/runtime-spec/1/LinuxResources"
_PROCESS_DETAILS = "containerd.runc.v1.ProcessDetails"
_MAX_SIGNAL = 64

M = TypeVar("M", bound=Message)


class TaskRef(NamedTuple):
    """A request that only names a container."""

    container_id: ContainerId


class ProcessName(NamedTuple):
    """A request that only names a process."""

    container_id: ContainerId
    exec_id: ExecId | None


class KillRequest(NamedTuple):
    container_id: ContainerId
    exec_id: ExecId | None
    signal: int
    all_processes: bool


class ResizeRequest(NamedTuple):
    container_id: ContainerId
    exec_id: ExecId | None
    width: int
    height: int


class TaskUpdate(NamedTuple):
    container_id: ContainerId
    resources: Mapping[str, Any]


class ShutdownRequest(NamedTuple):
    container_id: ContainerId
    now: bool


# ---- requests ----


def task_ref(payload: bytes) -> TaskRef:
    """The container of a request that has only an id: it is field 1 of all of them."""
    return TaskRef(_container_id(parsed(pb.PidsRequest, payload).id))


def connect_request(payload: bytes) -> TaskRef:
    """The id may be empty: containerd's tests ask for the shim's pid alone."""
    text = parsed(pb.ConnectRequest, payload).id
    return TaskRef(_container_id(text) if text else ContainerId(""))


def process_ref(payload: bytes) -> ProcessName:
    """The process of State, Start, Delete, Wait and CloseIO: the id is field 1, the exec id field 2 of all of them."""
    request = parsed(pb.StateRequest, payload)
    return ProcessName(_container_id(request.id), _exec_id(request.exec_id))


def create_request(payload: bytes) -> CreateTask:
    request = parsed(pb.CreateTaskRequest, payload)
    container_id = _container_id(request.id)
    if request.checkpoint:
        raise InvalidArgument(f"create task {container_id!r}: restoring from a checkpoint is not supported")
    return CreateTask(
        container_id=container_id,
        bundle=absolute_path(request.bundle, f"bundle of task {container_id!r}"),
        rootfs=tuple(
            RootfsMount(type=mount.type, source=mount.source, target=mount.target, options=tuple(mount.options))
            for mount in request.rootfs
        ),
        stdio=_stdio(request),
        options=_runtime_options(request.options) if request.HasField("options") else None,
    )


def exec_request(payload: bytes) -> ExecTask:
    request = parsed(pb.ExecProcessRequest, payload)
    container_id = _container_id(request.id)
    exec_id = ExecId(checked_id(request.exec_id, "exec id"))
    process = json_object(request.spec, _PROCESS, f"process of exec {exec_id!r}")
    # The request's field decides, not the one of its process.
    process["terminal"] = request.terminal
    return ExecTask(container_id=container_id, exec_id=exec_id, stdio=_stdio(request), process=process)


def kill_request(payload: bytes) -> KillRequest:
    request = parsed(pb.KillRequest, payload)
    container_id = _container_id(request.id)
    if request.signal > _MAX_SIGNAL:
        raise InvalidArgument(f"kill task {container_id!r}: {request.signal} is not a signal number")
    return KillRequest(container_id, _exec_id(request.exec_id), request.signal, request.all)


def resize_request(payload: bytes) -> ResizeRequest:
    request = parsed(pb.ResizePtyRequest, payload)
    return ResizeRequest(_container_id(request.id), _exec_id(request.exec_id), request.width, request.height)


def update_request(payload: bytes) -> TaskUpdate:
    request = parsed(pb.UpdateTaskRequest, payload)
    container_id = _container_id(request.id)
    return TaskUpdate(container_id, linux_resources(request, f"task {container_id!r}"))


def shutdown_request(payload: bytes) -> ShutdownRequest:
    """The id is for the log only: containerd sends the id of the task that it deleted last."""
    request = parsed(pb.ShutdownRequest, payload)
    return ShutdownRequest(ContainerId(request.id), request.now)


# ---- replies ----


def empty_reply(_: None) -> bytes:
    return b""


def create_reply(pid: int) -> bytes:
    return pb.CreateTaskResponse(pid=pid).SerializeToString()


def start_reply(pid: int) -> bytes:
    return pb.StartResponse(pid=pid).SerializeToString()


def state_reply(state: ProcessState) -> bytes:
    """`exited_at` is absent until the process has ended: containerd reads that as its zero time."""
    reply = pb.StateResponse(
        id=state.container_id,
        exec_id=state.exec_id or "",
        bundle=state.bundle,
        pid=state.pid,
        status=state.status.value,
        stdin=state.stdio.stdin,
        stdout=state.stdio.stdout,
        stderr=state.stdio.stderr,
        terminal=state.stdio.terminal,
    )
    if state.exit is not None:
        reply.exit_status = uint32(state.exit.status)
        reply.exited_at.CopyFrom(timestamp(state.exit.exited_at_ns))
    return reply.SerializeToString()


def pids_reply(processes: tuple[ProcessInfo, ...]) -> bytes:
    reply = pb.PidsResponse()
    for process in processes:
        row = reply.processes.add(pid=process.pid)
        if process.exec_id is not None:
            details = runc_options_pb2.ProcessDetails(exec_id=process.exec_id)
            row.info.CopyFrom(AnyMessage(type_url=_PROCESS_DETAILS, value=details.SerializeToString()))
    return reply.SerializeToString()


def wait_reply(exit_status: ExitStatus) -> bytes:
    return pb.WaitResponse(
        exit_status=uint32(exit_status.status), exited_at=timestamp(exit_status.exited_at_ns)
    ).SerializeToString()


def delete_reply(deleted: tuple[int, ExitStatus]) -> bytes:
    pid, exit_status = deleted
    return pb.DeleteResponse(
        pid=pid, exit_status=uint32(exit_status.status), exited_at=timestamp(exit_status.exited_at_ns)
    ).SerializeToString()


def connect_reply(shim_pid: int, task_pid: int) -> bytes:
    return pb.ConnectResponse(shim_pid=shim_pid, task_pid=task_pid).SerializeToString()


def stats_reply(metrics: AnyMessage) -> bytes:
    return pb.StatsResponse(stats=metrics).SerializeToString()


def timestamp(ns: int) -> Timestamp:
    """`ns`, nanoseconds since the epoch, as protobuf's type."""
    return Timestamp(seconds=ns // 1_000_000_000, nanos=ns % 1_000_000_000)


# ---- parts ----


def uint32(status: int) -> int:
    """An exit status in the field's range; a guest may report any int32."""
    return status & 0xFFFFFFFF


def parsed(kind: type[M], payload: bytes) -> M:
    """The message without fields that we do not know; the log names a kind that has some, once. Raises InvalidArgument.

    A newer caller's field has no effect here, and the call is carried out as an older caller's.
    """
    message = kind()
    try:
        message.ParseFromString(payload)
    except DecodeError as error:
        raise InvalidArgument(f"decode {kind.DESCRIPTOR.full_name}: {error}") from error
    size_bytes = message.ByteSize()
    message.DiscardUnknownFields()
    if message.ByteSize() != size_bytes:
        _warn_of_unknown_fields(kind.DESCRIPTOR.full_name)
    return message


@cache
def _warn_of_unknown_fields(message: str) -> None:
    log.warning("call has fields that this release does not know", extra={"method": message})


def _container_id(text: str) -> ContainerId:
    return ContainerId(checked_id(text, "container id"))


def _exec_id(text: str) -> ExecId | None:
    return ExecId(checked_id(text, "exec id")) if text else None


def absolute_path(path: str, what: str) -> HostPath:
    """The path. Raises InvalidArgument naming `what` if it is not absolute."""
    if not path.startswith("/") or "\0" in path:
        raise InvalidArgument(f"check {what}: {path[:200]!r} is not an absolute path")
    return HostPath(path)


def _stdio(request: pb.CreateTaskRequest | pb.ExecProcessRequest) -> Stdio:
    return Stdio(
        stdin=request.stdin,
        stdout=request.stdout,
        # A terminal has one output: a path for stderr is ignored.
        stderr="" if request.terminal else request.stderr,
        terminal=request.terminal,
    )


def _runtime_options(options: AnyMessage) -> RuntimeOptions | None:
    """Options of the generic type; None for others, such as runc's, which clients send to every shim."""
    name = type_name(options)
    if name == _RUNTIME_OPTIONS:
        found = parsed(runtimeoptions_pb2.Options, options.value)
        return RuntimeOptions(config_path=found.config_path, config_body=found.config_body)
    if name:
        log.debug("runtime options of another runtime ignored", extra={"type": name})
    return None


def linux_resources(request: pb.UpdateTaskRequest | sandbox_pb2.UpdateSandboxRequest, of: str) -> Mapping[str, Any]:
    """OCI's LinuxResources in an update; empty if it has none. Raises InvalidArgument."""
    if not request.HasField("resources"):
        return {}
    return json_object(request.resources, _LINUX_RESOURCES, f"resources of {of}")


def json_object(message: AnyMessage, wanted: str, what: str) -> dict[str, Any]:
    """The JSON object that an Any carries under the type `wanted`; the host in its URL is ignored."""
    if message.type_url and not message.type_url.endswith(wanted):
        raise InvalidArgument(f"decode {what}: type {message.type_url!r} is not {wanted!r}")
    value = json_value(message.value, lambda problem: InvalidArgument(f"decode {what}: {problem}"))
    if not isinstance(value, dict):
        raise InvalidArgument(f"decode {what}: not a JSON object")
    return value


def type_name(message: AnyMessage) -> str:
    """The name of the type in it, without the host of its URL."""
    return message.type_url.rpartition("/")[2]
