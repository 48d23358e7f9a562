"""Log programs of `binary://` URIs: a program of the node's operator that reads a container's output.

It gets the read ends of stdout and stderr as fds 3 and 4 and reports on fd 5 that it is ready: by a byte or, except for
`binary-v2`, by closing it. Source: containerd core/runtime/v2/logging and the runc shim's process/io.go.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping

import msgspec

from pyshim.host.fds import OwnedFd
from pyshim.host.processes.children import Child, Children
from pyshim.host.streams.fifos import PipeOutput, Readiness
from pyshim.model.errors import DeadlineExceeded, FailedPrecondition


class LogProgramTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a log program in seconds; the last is containerd's."""

    ready_s: float = 10.0
    end_of_input_s: float = 1.0
    """To end by itself: a signal at once would put its last lines at risk."""
    terminate_s: float = 12.0
    """To end after SIGTERM."""


CONTAINERD_TIMES = LogProgramTimes()


class LogProgram:
    """A running log program and the pipes it reads; ended by `close`."""

    def __init__(self, *, child: Child, stdout: PipeOutput, stderr: PipeOutput | None, times: LogProgramTimes) -> None:
        self.stdout = stdout
        self.stderr = stderr
        self._child = child
        self._times = times

    async def close(self) -> None:
        """The program has ended: at the end of its input, by SIGTERM, or by SIGKILL after 12 s. Idempotent."""
        await self.stdout.close()
        if self.stderr is not None:
            await self.stderr.close()
        try:
            try:
                async with asyncio.timeout(self._times.end_of_input_s):
                    await self._child.wait()
            except TimeoutError:
                await self._child.end(signal_number=signal.SIGTERM, grace_s=self._times.terminate_s)
        except asyncio.CancelledError:
            # The caller's deadline has passed; the program must not outlive its container.
            self._child.kill(signal.SIGKILL)
            raise


def _pipe() -> tuple[OwnedFd, OwnedFd]:
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    return OwnedFd(read_fd), OwnedFd(write_fd)


def _output_pipe() -> tuple[OwnedFd, PipeOutput]:
    read_end, write_end = _pipe()
    os.set_blocking(write_end.fileno(), False)
    return read_end, PipeOutput(write_end)


async def start_log_program(
    argv: tuple[str, ...],
    *,
    environment: Mapping[str, str],
    with_stderr: bool,
    ready_byte_required: bool,
    children: Children,
    times: LogProgramTimes,
) -> LogProgram:
    """The program runs and is ready. Raises ShimError naming it when it cannot start or does not become ready."""
    stdout_end, stdout = _output_pipe()
    stderr_end, stderr = _output_pipe()
    ready, ready_end = _pipe()
    with stdout_end, stderr_end, ready, ready_end:
        os.set_blocking(ready.fileno(), False)
        try:
            child = await children.spawn(
                argv,
                env=environment,
                fds={3: stdout_end.fileno(), 4: stderr_end.fileno(), 5: ready_end.fileno()},
            )
        except BaseException:
            await stdout.close()
            await stderr.close()
            raise
        if not with_stderr:
            # It still gets a pipe there, at its end from the start.
            await stderr.close()
        program = LogProgram(child=child, stdout=stdout, stderr=stderr if with_stderr else None, times=times)
        ready_end.close()
        try:
            await _until_ready(ready, child, argv[0], times, ready_byte_required=ready_byte_required)
        except BaseException:
            child.kill(signal.SIGKILL)
            await program.close()
            raise
        return program


async def _until_ready(
    ready: OwnedFd, child: Child, name: str, times: LogProgramTimes, *, ready_byte_required: bool
) -> None:
    try:
        async with asyncio.timeout(times.ready_s):
            await Readiness(ready, writing=False).wait()
    except TimeoutError:
        raise DeadlineExceeded(f"start log program {name!r}: not ready within {times.ready_s:g} s") from None
    if os.read(ready.fileno(), 1) or not ready_byte_required:
        return
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(times.end_of_input_s):
            await child.wait()
    raise FailedPrecondition(f"start log program {name!r}: it closed its ready pipe; {child.describe_exit()}")
