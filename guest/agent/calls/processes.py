"""Processes in containers: exec, signals, exit codes, stdio."""

from __future__ import annotations

from protos.agent import agent_pb2 as pb

from guest.agent.container.container import CONTAINERS, Containers
from guest.agent.container.process import Process
from guest.agent.container.spec import check_id, check_process
from guest.agent.container.users import apply_string_user
from guest.agent.errors import FailedPrecondition, InvalidArgument
from guest.agent.storage.passthrough import rewrite_env
from guest.agent.streams import ReadEnd

# A reply must fit a ttrpc message; a pipe rarely holds more anyway.
_MAX_READ_BYTES = 1 << 20


class ProcessCalls:
    def __init__(self, *, containers: Containers) -> None:
        self._containers = containers

    def _process(self, container_id: str, exec_id: str) -> Process:
        return self._containers.find(container_id).process(exec_id)

    async def execute(self, request: pb.ExecProcessRequest) -> None:
        container = self._containers.find(request.container_id)
        exec_id = check_id(request.exec_id, "exec id")
        doing = f"exec {exec_id!r} in container {container.cid!r}"
        if not request.HasField("process"):
            raise InvalidArgument(f"{doing}: request has no process")
        process = request.process
        check_process(process, doing)
        apply_string_user(process.User, request.string_user, f"{CONTAINERS}/{container.cid}/rootfs")
        process.Env[:] = rewrite_env(process.Env, container.pci_addresses)
        await container.execute(exec_id, process)

    async def signal(self, request: pb.SignalProcessRequest) -> None:
        self._containers.find(request.container_id).signal(request.exec_id, request.signal)

    async def wait(self, request: pb.WaitProcessRequest) -> pb.WaitProcessResponse:
        """The exit code, once there is one. Every caller gets it, until the container is removed."""
        code = await self._process(request.container_id, request.exec_id).wait()
        return pb.WaitProcessResponse(status=code)

    async def write_stdin(self, request: pb.WriteStreamRequest) -> pb.WriteStreamResponse:
        """All bytes are in the pipe. Empty data closes it, as in kata-agent."""
        process = self._process(request.container_id, request.exec_id)
        if request.data:
            await process.stdin.write(request.data)
        else:
            await _close_stdin(process)
        return pb.WriteStreamResponse(len=len(request.data))

    async def close_stdin(self, request: pb.CloseStdinRequest) -> None:
        await _close_stdin(self._process(request.container_id, request.exec_id))

    async def read_stdout(self, request: pb.ReadStreamRequest) -> pb.ReadStreamResponse:
        return await _read(self._process(request.container_id, request.exec_id).stdout, request.len)

    async def read_stderr(self, request: pb.ReadStreamRequest) -> pb.ReadStreamResponse:
        return await _read(self._process(request.container_id, request.exec_id).stderr, request.len)

    async def resize_terminal(self, request: pb.TtyWinResizeRequest) -> None:
        process = self._process(request.container_id, request.exec_id)
        if not process.has_terminal:
            raise FailedPrecondition(f"resize terminal of {request.exec_id or 'init'!r}: the process has none")
        if request.row > 0xFFFF or request.column > 0xFFFF:
            size = f"{request.row} rows, {request.column} columns"
            raise InvalidArgument(f"resize terminal: {size}: more than 65535")
        process.resize_terminal(request.row, request.column)


async def _close_stdin(process: Process) -> None:
    # A terminal has one file for both directions: closing it would hang up the session and lose output.
    if not process.has_terminal:
        await process.stdin.finish()


async def _read(source: ReadEnd | None, size: int) -> pb.ReadStreamResponse:
    """A read of no bytes ends the stream: the caller does not want the rest (kata-agent refuses such a read)."""
    if source is None:
        return pb.ReadStreamResponse()
    if size == 0:
        source.close()
    return pb.ReadStreamResponse(data=await source.read(min(size, _MAX_READ_BYTES)))
