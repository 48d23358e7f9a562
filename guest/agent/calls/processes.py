"""Processes in containers: exec, signals, exit codes, stdio."""

from __future__ import annotations

from guest.agent.calls.containers import find, set_user
from guest.agent.container.process import Process
from guest.agent.container.spec import check_id, check_process, oci_process
from guest.agent.errors import FailedPrecondition, InvalidArgument
from guest.agent.wire.codec import Message

TYPE_CHECKING = False
if TYPE_CHECKING:
    from guest.agent.agent import Agent
    from guest.agent.runtime.streams import Source

# A reply must fit a ttrpc message; a pipe rarely holds more anyway.
_MAX_READ_BYTES = 1 << 20


async def execute(agent: Agent, request: Message) -> None:
    container = find(agent, request.container_id)
    exec_id = check_id(request.exec_id, "exec id")
    if not request.has("process"):
        raise InvalidArgument(f"exec {exec_id!r} in container {container.cid!r}: request has no process")
    process: Message = request.process
    check_process(process, f"exec {exec_id!r} in container {container.cid!r}")
    set_user(process, request.string_user, f"{container.bundle}/rootfs")
    container.rewrite_env(process)
    await container.execute(exec_id, process, oci_process(process))


async def signal(agent: Agent, request: Message) -> None:
    find(agent, request.container_id).signal(request.exec_id, request.signal)


async def wait(agent: Agent, request: Message) -> Message:
    """The exit code, as soon as there is one, to everyone who asks until the container is removed."""
    process = find(agent, request.container_id).process(request.exec_id)
    code = await process.exited
    process.was_waited_for()
    return Message("WaitProcessResponse", status=code)


async def write_stdin(agent: Agent, request: Message) -> Message:
    """All bytes are in the pipe. Empty data closes it, as kata-agent does."""
    process = find(agent, request.container_id).process(request.exec_id)
    if not request.data:
        await _close_stdin(process)
    elif process.stdin is None:
        raise FailedPrecondition("write stdin: the process has none")
    else:
        await process.stdin.write(request.data)
    return Message("WriteStreamResponse", len=len(request.data))


async def close_stdin(agent: Agent, request: Message) -> None:
    await _close_stdin(find(agent, request.container_id).process(request.exec_id))


async def _close_stdin(process: Process) -> None:
    # A terminal has one file for both directions: closing it would hang up the session and lose output.
    if process.stdin is not None and not process.has_terminal:
        await process.stdin.finish()


async def read_stdout(agent: Agent, request: Message) -> Message:
    process = find(agent, request.container_id).process(request.exec_id)
    return await _read(process.stdout, request.len)


async def read_stderr(agent: Agent, request: Message) -> Message:
    process = find(agent, request.container_id).process(request.exec_id)
    return await _read(process.stderr, request.len)


async def _read(source: Source | None, size: int) -> Message:
    if size == 0:
        raise InvalidArgument("read stream: len is 0")
    data = b"" if source is None else await source.read(min(size, _MAX_READ_BYTES))
    return Message("ReadStreamResponse", data=data)


async def resize_terminal(agent: Agent, request: Message) -> None:
    process = find(agent, request.container_id).process(request.exec_id)
    if process.terminal_fd < 0:
        raise FailedPrecondition(f"resize terminal of {request.exec_id or 'init'!r}: the process has none")
    if request.row > 0xFFFF or request.column > 0xFFFF:
        raise InvalidArgument(f"resize terminal: {request.row} rows, {request.column} columns: more than 65535")
    import fcntl
    import termios
    from struct import pack

    fcntl.ioctl(process.terminal_fd, termios.TIOCSWINSZ, pack("HHHH", request.row, request.column, 0, 0))
