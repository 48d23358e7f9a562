"""agent.debug_console: a root shell in the guest for each connection to the vsock debug port. Off by default."""

from __future__ import annotations

import asyncio
import logging
import os
import socket

from guest.agent.children import Children
from guest.agent.errors import AgentError
from guest.agent.streams import ReadEnd, WriteEnd
from guest.agent.transport import vsock_listener

log = logging.getLogger(__name__)

_CHUNK_BYTES = 16 << 10
_SHELL = "/bin/sh"
_DRAIN_S = 5.0
"""Seconds for a client to read the shell's last output. A program that outlives the shell could write for ever."""


async def serve(children: Children, port: int) -> None:
    """Each connection to the vsock port gets a shell, for ever. A guest without vsock logs that it has no console."""
    try:
        listener = vsock_listener(f"-1:{port}", f"vsock://-1:{port}")
    except OSError as error:
        log.warning("no debug console", extra={"port": port, "error": error})
        return
    listener.setblocking(False)
    async with asyncio.TaskGroup() as shells:
        while True:
            connection, _address = await asyncio.get_running_loop().sock_accept(listener)
            shells.create_task(serve_shell(children, connection), name="debug console")


async def serve_shell(children: Children, connection: socket.socket) -> None:
    """A shell on a new terminal has served `connection` until either ended; both are closed."""
    with connection:
        try:
            master, slave = os.openpty()
        except OSError as error:
            log.warning("no terminal for the debug console", extra={"error": error})
            return
        inward = ReadEnd(os.dup(connection.fileno())), WriteEnd(os.dup(master))
        outward = ReadEnd(master), WriteEnd(os.dup(connection.fileno()))
        try:
            shell = children.spawn([_SHELL, "-i"], stdin=slave, stdout=slave, stderr=slave)
        except AgentError as error:
            log.warning("no shell for the debug console", extra={"error": error})
        else:
            os.close(slave)  # the terminal ends with its last program
            slave = -1
            tasks = _, shown, ended = [
                asyncio.create_task(work) for work in (_copy(*inward), _copy(*outward), shell.wait())
            ]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                await asyncio.wait([shown], timeout=_DRAIN_S)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            if slave >= 0:
                os.close(slave)
            for stream in (*inward, *outward):
                stream.close()


async def _copy(source: ReadEnd, sink: WriteEnd) -> None:
    while data := await source.read(_CHUNK_BYTES):
        await sink.write(data)
