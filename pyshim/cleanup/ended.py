"""A process that answers CRI-O for a sandbox whose shim died: without an answer CRI-O never removes the pod."""

import asyncio
import contextlib
import os
import socket
import time
from pathlib import Path

from msgspec.structs import replace

from pyshim.model.oci import Caller, caller_of
from pyshim.model.sandbox import ContainerSnapshot
from pyshim.model.task import ExitStatus, ProcessState, Status, Stdio
from pyshim.start.address import abandon, claim, unlink
from pyshim.start.daemonize import LISTENING_FD, above_table, become_daemon
from pyshim.state.schema import SandboxState
from pyshim.task.ended import EndedContainers
from pyshim.ttrpc import Server

EXIT_LOST = 255
EXITS = "/run/crio/exits"
"""CRI-O's default of `container_exits_dir`: a file of a container's id makes it look at the container."""
_LOOK_S = 5.0
"""Seconds between two reads of the bundles."""
_REPLY_GRACE_S = 1.0


def answer_crio(state: SandboxState, exits: str = EXITS) -> int:
    """The pid of a process that serves the dead shim's socket until CRI-O has removed the pod, which it sees ended.

    0, without a process, for a sandbox of another caller, one without bundles, and while the socket is served.
    Raises OSError when there can be no process.
    """
    left = _left(state)
    path = state.shim.socket.removeprefix("unix://")
    listener = claim(path) if left else None
    if listener is None:
        return 0
    try:
        pid = os.fork()
    except OSError:
        abandon(listener, path)
        raise
    if pid == 0:
        _answer(listener.detach(), path, left)
    listener.close()
    for container in left:
        with contextlib.suppress(OSError):  # no such directory: CRI-O has another, and looks after its restart
            Path(exits, container.container_id).write_text("Exited")
    return pid


def _left(state: SandboxState) -> tuple[ProcessState, ...]:
    """CRI-O's containers whose bundles are there, as ended now unless they had ended before."""
    containers = () if state.snapshot is None else state.snapshot.containers
    return tuple(
        _ended(container)
        for container in containers
        if caller_of(container.annotations) is Caller.CRI_O and os.path.isdir(container.bundle)
    )


def _ended(container: ContainerSnapshot) -> ProcessState:
    return ProcessState(
        container_id=container.container_id,
        exec_id=None,
        bundle=container.bundle,
        pid=0,
        status=Status.STOPPED,
        stdio=container.stdio,
        exit=container.exit or ExitStatus(status=EXIT_LOST, exited_at_ns=time.time_ns()),
    )


def _answer(listening_fd: int, path: str, left: tuple[ProcessState, ...]) -> None:
    """In the child: serves, then ends the process."""
    try:
        os.chdir("/")
        null_fd = above_table(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC))
        become_daemon(listening_fd, null_fd, keep=null_fd)
        asyncio.run(_serve(socket.socket(fileno=LISTENING_FD), left))
        unlink(path)
    finally:
        os._exit(0)


async def _serve(listener: socket.socket, left: tuple[ProcessState, ...]) -> None:
    unknown = replace(left[0], stdio=Stdio(stdin="", stdout="", stderr="", terminal=False))
    ended = EndedContainers(left, unknown)
    server = Server(services=ended.services())
    serving = asyncio.create_task(server.serve(listener), name="accept")
    while _has_bundle(left):  # noqa: ASYNC110 (removal by CRI-O has no event here)
        await asyncio.sleep(_LOOK_S)
    await server.shutdown(_REPLY_GRACE_S)
    await serving


def _has_bundle(left: tuple[ProcessState, ...]) -> bool:
    return any(os.path.isdir(container.bundle) for container in left)
