"""Opens stdin, stdout and stderr of a process as containerd names them: FIFOs, files, log programs.

Source of the forms: containerd's runc shim, process/io.go, and core/runtime/v2/README.md, "Logging".
"""

import os
from urllib.parse import parse_qsl, unquote, urlsplit

from pyshim.host.fds import OwnedFd
from pyshim.host.os_errors import os_errors
from pyshim.host.processes.children import Children
from pyshim.host.streams.fifos import (
    READ_BYTES,
    FifoInput,
    PipeOutput,
    is_fifo,
    open_fd,
    open_fifo_input,
    open_fifo_output,
)
from pyshim.host.streams.log_programs import CONTAINERD_TIMES, LogProgram, LogProgramTimes, start_log_program
from pyshim.host.threads import in_own_thread
from pyshim.model.errors import InvalidArgument
from pyshim.model.task import Stdio


class FileOutput:
    """A file written at its end. Opened once per stream: with O_APPEND, two streams may share a file."""

    def __init__(self, fd: OwnedFd, path: str) -> None:
        self._fd = fd
        self._path = path

    async def write(self, data: bytes | memoryview) -> None:
        """All of `data` is in the file. Raises FailedPrecondition naming the file when it cannot be (disk full)."""
        if not self._fd.is_open:
            return
        # In a thread: a slow or dead disk must not stop every other stream of the pod. On a descriptor of its own,
        # so that a close or cancellation in the middle cannot hand the thread another file.
        copy = OwnedFd(os.dup(self._fd.fileno()))
        with os_errors(f"write {self._path!r}"):
            await in_own_thread(_write_all_and_close, copy, data)

    async def close(self) -> None:
        self._fd.close()

    finish = close
    """Written bytes are in the file; there is no reader to wait for."""


def _write_all_and_close(fd: OwnedFd, data: bytes | memoryview) -> None:
    with fd:
        view = memoryview(data)
        while view:
            view = view[os.write(fd.fileno(), view) :]


class FileInput:
    """A stdin that is not a FIFO: read to its end, which CloseIO does not change."""

    def __init__(self, fd: OwnedFd, path: str) -> None:
        self._fd = fd
        self._path = path

    async def read(self) -> bytes:
        if not self._fd.is_open:
            return b""
        copy = OwnedFd(os.dup(self._fd.fileno()))
        with os_errors(f"read {self._path!r}"):
            return await in_own_thread(_read_and_close, copy)

    def close_io(self) -> None:
        """No effect: there is no other writer."""

    async def close(self) -> None:
        self._fd.close()


def _read_and_close(fd: OwnedFd) -> bytes:
    with fd:
        return os.read(fd.fileno(), READ_BYTES)


def open_file_output(path: str, stream: str) -> FileOutput:
    """An existing file (or device) to append to. Raises ShimError naming it."""
    return FileOutput(open_fd(path, os.O_WRONLY | os.O_APPEND, stream), path)


def open_log_file(path: str, stream: str) -> FileOutput:
    """The log file of a `file://` URI, made with its directories when missing. Raises ShimError naming it."""
    with os_errors(f"open {stream} log {path!r}"):
        os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOCTTY, 0o644)
    return FileOutput(OwnedFd(fd), path)


def open_file_input(path: str) -> FileInput:
    """A file (or device) to read to its end. Raises ShimError naming it."""
    return FileInput(open_fd(path, os.O_RDONLY, "stdin"), path)


LOG_SCHEMES = ("fifo", "file", "binary", "binary-v2")


class Streams:
    """The open streams of one process; an attribute is None if the client wants no such stream."""

    def __init__(self) -> None:
        self.stdin: FifoInput | FileInput | None = None
        self.stdout: PipeOutput | FileOutput | None = None
        self.stderr: PipeOutput | FileOutput | None = None
        self._log_program: LogProgram | None = None

    async def close(self) -> None:
        """All streams closed, then the log program ended. Idempotent."""
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                await stream.close()
        if self._log_program is not None:
            await self._log_program.close()

    def adopt(self, program: LogProgram) -> None:
        """`program` reads stdout and stderr, and ends with these streams."""
        self._log_program = program
        self.stdout, self.stderr = program.stdout, program.stderr


async def open_streams(
    stdio: Stdio,
    *,
    namespace: str,
    process_id: str,
    children: Children,
    log_program_times: LogProgramTimes = CONTAINERD_TIMES,
) -> Streams:
    """Every stream `stdio` names, open. Never waits for a client; waits for a log program to say it is ready.

    With a terminal there is no stderr: the terminal's output is all stdout. A log URI is given once, as stdout, and
    takes both. Raises ShimError naming stream and path, with nothing left open.
    """
    streams = Streams()
    try:
        streams.stdin = _open_input(stdio.stdin)
        with_stderr = not stdio.terminal
        scheme, _ = _split(stdio.stdout, "stdout")
        if scheme in ("binary", "binary-v2"):
            program = await start_log_program(
                _program(stdio.stdout),
                # Exactly this, as containerd's logging package expects it.
                environment={"CONTAINER_ID": process_id, "CONTAINER_NAMESPACE": namespace},
                with_stderr=with_stderr,
                ready_byte_required=scheme == "binary-v2",
                children=children,
                times=log_program_times,
            )
            streams.adopt(program)
        elif scheme == "file":
            streams.stdout = _open_output(stdio.stdout, "stdout")
            streams.stderr = _open_output(stdio.stdout, "stderr") if with_stderr else None
        else:
            streams.stdout = _open_output(stdio.stdout, "stdout")
            streams.stderr = _open_output(stdio.stderr, "stderr") if with_stderr else None
    except BaseException:
        await streams.close()
        raise
    return streams


def _split(value: str, stream: str) -> tuple[str, str]:
    """The scheme of a stream's name ("" for no stream, "fifo" for a bare path) and the path in it."""
    if not value:
        return "", ""
    if "\0" in unquote(value):
        raise InvalidArgument(f"open {stream} {value!r}: it contains a null byte")
    if "://" not in value:
        return "fifo", value
    scheme, _, _ = value.partition("://")
    if scheme not in LOG_SCHEMES:
        raise InvalidArgument(f"open {stream} {value!r}: scheme {scheme!r} is not one of {', '.join(LOG_SCHEMES)}")
    try:
        parts = urlsplit(value)
    except ValueError as error:
        raise InvalidArgument(f"open {stream} {value!r}: {error}") from error
    path = unquote(parts.path)
    if parts.netloc or not path.startswith("/"):
        raise InvalidArgument(f"open {stream} {value!r}: expected {scheme}:/// and an absolute path")
    return scheme, path


def _open_input(value: str) -> FifoInput | FileInput | None:
    scheme, path = _split(value, "stdin")
    match scheme:
        case "":
            return None
        case "fifo":
            return open_fifo_input(path) if is_fifo(path) else open_file_input(path)
    raise InvalidArgument(f"open stdin {value!r}: scheme {scheme!r} is for output only")


def _open_output(value: str, stream: str) -> PipeOutput | FileOutput | None:
    scheme, path = _split(value, stream)
    match scheme:
        case "":
            return None
        case "fifo":
            return open_fifo_output(path, stream) if is_fifo(path) else open_file_output(path, stream)
        case "file":
            return open_log_file(path, stream)
    raise InvalidArgument(f"open {stream} {value!r}: a log program can only be given as stdout")


def _program(value: str) -> tuple[str, ...]:
    """argv of a `binary://` URI: the path, then every query key and its first value (empty when it has none)."""
    _, path = _split(value, "stdout")
    first: dict[str, str] = {}
    for key, argument in parse_qsl(urlsplit(value).query, keep_blank_values=True):
        first.setdefault(key, argument)
    words = [path]
    for key, argument in first.items():
        words += [key, argument]
    return tuple(words)
