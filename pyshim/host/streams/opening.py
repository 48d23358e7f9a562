"""Opens stdin, stdout and stderr of a process as containerd names them: FIFOs, files, log programs.

Source of the forms: containerd's runc shim, process/io.go, and core/runtime/v2/README.md, "Logging".
"""

from urllib.parse import parse_qsl, unquote, urlsplit

from pyshim.host.processes.children import Children
from pyshim.host.streams.fifos import FifoInput, PipeOutput, is_fifo, open_fifo_input, open_fifo_output
from pyshim.host.streams.files import FileInput, FileOutput, open_file_input, open_file_output, open_log_file
from pyshim.host.streams.log_programs import CONTAINERD_TIMES, LogProgram, LogProgramTimes, start_log_program
from pyshim.model.errors import InvalidArgument
from pyshim.model.task import Stdio

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
