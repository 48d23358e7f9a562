"""Both ends of a process's streams: the shim's as `open_streams` gives them, and the client's."""

import asyncio
import os
from pathlib import Path

from pyshim.host.processes.children import Children
from pyshim.host.streams.fifos import FifoInput, PipeOutput
from pyshim.host.streams.log_programs import LogProgramTimes
from pyshim.host.streams.opening import FileInput, FileOutput, Streams, open_streams
from pyshim.model.task import Stdio

TIMEOUT_S = 20
PATIENT = LogProgramTimes(ready_s=TIMEOUT_S, end_of_input_s=TIMEOUT_S, terminate_s=TIMEOUT_S)
"""A program that obeys does so before, however busy the machine is."""


async def opened(
    stdin: str | Path = "",
    stdout: str | Path = "",
    stderr: str | Path = "",
    *,
    terminal: bool = False,
    children: Children | None = None,
    log_program_times: LogProgramTimes = PATIENT,
) -> Streams:
    stdio = Stdio(stdin=str(stdin), stdout=str(stdout), stderr=str(stderr), terminal=terminal)
    return await open_streams(
        stdio, namespace="ns1", process_id="exec1", children=children or Children(), log_program_times=log_program_times
    )


async def input_from(path: str | Path) -> FifoInput | FileInput:
    """The shim's end of a process's stdin, which has no other streams."""
    stdin = (await opened(stdin=path)).stdin
    assert stdin is not None
    return stdin


async def output_to(path: str | Path) -> PipeOutput | FileOutput:
    """The shim's end of a process's stdout, which has no other streams."""
    stdout = (await opened(stdout=path)).stdout
    assert stdout is not None
    return stdout


def client(path: Path, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


async def read_to_end(fd: int) -> bytes:
    os.set_blocking(fd, True)
    chunks = []
    while chunk := await asyncio.to_thread(os.read, fd, 65536):
        chunks.append(chunk)
    return b"".join(chunks)


async def stalled(task: "asyncio.Task[None]") -> bool:
    """True while the task waits: it has had the loop many times over and every event that was due."""
    for _ in range(50):
        await asyncio.sleep(0)
    await asyncio.sleep(0.05)
    return not task.done()
