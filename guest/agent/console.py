"""agent.debug_console: a root shell in the guest for whoever connects to the vsock debug port. Off by default."""

from __future__ import annotations

import os

from guest.agent import log
from guest.agent.errors import AgentError
from guest.agent.runtime.streams import Sink, Source
from guest.agent.transport import listen, vsock_listener

TYPE_CHECKING = False
if TYPE_CHECKING:
    from guest.agent.agent import Agent

_CHUNK_BYTES = 16 << 10
_SHELL = "/bin/sh"


def start(agent: Agent) -> None:
    """Connections to the port get a shell each; a guest without vsock logs that there is no console."""
    port = agent.settings.debug_console_vport
    try:
        listener = vsock_listener(f"-1:{port}", f"vsock://-1:{port}")
    except OSError as error:
        log.warning("no debug console", port=port, error=error)
        return
    listen(agent, listener, lambda fd: serve(agent, fd))


def serve(agent: Agent, fd: int) -> None:
    """A shell on a terminal of its own talks to `fd`, which is closed when either ends."""
    master, slave = os.openpty()
    try:
        argv = [_SHELL, "-i"]
        exited = agent.children.spawn(argv, stdin=slave, stdout=slave, stderr=slave)
    except AgentError as error:
        log.warning("no shell for the debug console", error=error)
        os.close(master)
        os.close(fd)
        return
    finally:
        os.close(slave)
    streams = (Source(agent.loop, os.dup(fd)), Sink(agent.loop, os.dup(master)))
    back = (Source(agent.loop, os.dup(master)), Sink(agent.loop, os.dup(fd)))
    for fd_done in (fd, master):
        os.close(fd_done)
    inward = agent.loop.spawn("console in", _copy(*streams))
    outward = agent.loop.spawn("console out", _copy(*back))

    def end() -> None:
        for task in (inward, outward):
            task.cancel()
        for stream in (*streams, *back):
            stream.close()

    exited.when_done(end)
    inward.result.when_done(end)


async def _copy(source: Source, sink: Sink) -> None:
    while True:
        data = await source.read(_CHUNK_BYTES)
        if not data:
            return
        await sink.write(data)
