"""Task events as containerd.events messages in their envelope."""

from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct

from protos.containerd import events_pb2 as pb
from protos.containerd import events_ttrpc_pb2, types_pb2
from pyshim.model import task
from pyshim.task.translate import timestamp, uint32


def forward_request(event: task.TaskEvent, *, namespace: str, at_ns: int) -> bytes:
    """The ForwardRequest for `event`, which happened at `at_ns`. The type URL is bare: 1.6 decodes no other."""
    topic, message = _message(event)
    return events_ttrpc_pb2.ForwardRequest(
        envelope=types_pb2.Envelope(
            timestamp=timestamp(at_ns),
            namespace=namespace,
            topic=topic,
            event=AnyMessage(type_url=message.DESCRIPTOR.full_name, value=message.SerializeToString()),
        )
    ).SerializeToString()


def _message(event: task.TaskEvent) -> tuple[str, Message]:
    match event:
        case task.TaskCreated():
            return "/tasks/create", _created(event)
        case task.TaskStarted():
            return "/tasks/start", pb.TaskStart(container_id=event.container_id, pid=event.pid)
        case task.TaskExited():
            return "/tasks/exit", pb.TaskExit(
                container_id=event.container_id,
                id=event.process_id,
                pid=event.pid,
                exit_status=uint32(event.exit.status),
                exited_at=timestamp(event.exit.exited_at_ns),
            )
        case task.TaskDeleted():
            return "/tasks/delete", pb.TaskDelete(
                container_id=event.container_id,
                pid=event.pid,
                exit_status=uint32(event.exit.status),
                exited_at=timestamp(event.exit.exited_at_ns),
            )
        case task.ExecAdded():
            return "/tasks/exec-added", pb.TaskExecAdded(container_id=event.container_id, exec_id=event.exec_id)
        case task.ExecStarted():
            return "/tasks/exec-started", pb.TaskExecStarted(
                container_id=event.container_id, exec_id=event.exec_id, pid=event.pid
            )
        case task.TaskPaused():
            return "/tasks/paused", pb.TaskPaused(container_id=event.container_id)
        case task.TaskResumed():
            return "/tasks/resumed", pb.TaskResumed(container_id=event.container_id)
        case task.TaskOom():
            return "/tasks/oom", pb.TaskOOM(container_id=event.container_id)
        case task.RemoteVmLost():
            # containerd has no such event, and passes on topics that it does not have.
            details = Struct()
            details["remote_vm"] = event.container_id
            return "/pyshim/remote-vm-lost", details


def _created(event: task.TaskCreated) -> pb.TaskCreate:
    request = event.request
    return pb.TaskCreate(
        container_id=event.container_id,
        bundle=request.bundle,
        rootfs=[
            types_pb2.Mount(type=mount.type, source=mount.source, target=mount.target, options=mount.options)
            for mount in request.rootfs
        ],
        io=pb.TaskIO(
            stdin=request.stdio.stdin,
            stdout=request.stdio.stdout,
            stderr=request.stdio.stderr,
            terminal=request.stdio.terminal,
        ),
        pid=event.pid,
    )
