"""The agent's socket on the node: every connection to it is one over TLS to the forwarder in the VM.

The shim's calls get the adaptor's edits on their way (`edits.py`); replies are passed on as they come.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import ssl
from pathlib import Path

from pyshim.ttrpc.framing import FrameReader

from .edits import edited_frame

log = logging.getLogger("remote.proxy")

_PIECE_BYTES = 256 << 10
# A first segment that finds no interface in the guest is said again late, so a new attempt may overtake older ones.
_ATTEMPT_EVERY_S, _ATTEMPTS = 2.0, 5
_PAUSE_S = 0.2
_CONNECT_S = 60.0


class AgentProxy:
    """Listens on `path` between `open` and `close`. `server_name` is whom the forwarder must prove to be."""

    def __init__(self, path: Path, port: int, server_name: str, context: ssl.SSLContext) -> None:
        self._path = path
        self._port = port
        self._server_name = server_name
        self._context = context
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        self._path.unlink(missing_ok=True)
        before = os.umask(0o177)
        try:
            self._server = await asyncio.start_unix_server(self._accepted, str(self._path), limit=_PIECE_BYTES)
        finally:
            os.umask(before)

    async def close(self) -> None:
        """Nothing listens, and what was connected is not any more. Idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self._path.unlink(missing_ok=True)
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def reach(self) -> None:
        """The forwarder has answered. Tries for ever: the caller has the deadline."""
        attempts: set[asyncio.Task[bool]] = set()
        try:
            while True:
                if len(attempts) < _ATTEMPTS:
                    attempts.add(asyncio.create_task(self._attempt(), name=f"reach {self._server_name}"))
                done, attempts = await asyncio.wait(
                    attempts, timeout=_ATTEMPT_EVERY_S, return_when=asyncio.FIRST_COMPLETED
                )
                if any(task.result() for task in done):
                    return
                if done:
                    await asyncio.sleep(_PAUSE_S)
        finally:
            for task in attempts:
                task.cancel()
            await asyncio.gather(*attempts, return_exceptions=True)

    async def _attempt(self) -> bool:
        try:
            _, writer = await self._connect()
        except (OSError, TimeoutError) as error:
            log.debug("forwarder does not answer yet: %s", error or type(error).__name__)
            return False
        writer.transport.abort()
        return True

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        async with asyncio.timeout(_CONNECT_S):
            return await asyncio.open_connection(
                "127.0.0.1",
                self._port,
                ssl=self._context,
                server_hostname=self._server_name,
                ssl_handshake_timeout=_CONNECT_S,
                limit=_PIECE_BYTES,
            )

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer), name=f"proxy {self._server_name}")
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Copies until one side ends; then what it said is handed on, and both are closed."""
        far: asyncio.StreamWriter | None = None
        try:
            far_reader, far = await self._connect()
            copies = {asyncio.create_task(_copy_edited(reader, far)), asyncio.create_task(_copy(far_reader, writer))}
            try:
                await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for copy in copies:
                    copy.cancel()
                await asyncio.gather(*copies, return_exceptions=True)
        except (OSError, TimeoutError) as error:
            log.warning("agent of %s not reached: %s", self._server_name, error or type(error).__name__)
        finally:
            for end in (writer, far):
                if end is not None:
                    end.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_PIECE_BYTES):
            writer.write(data)
            await writer.drain()


async def _copy_edited(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    frames = FrameReader()
    with contextlib.suppress(OSError):
        while data := await reader.read(_PIECE_BYTES):
            for frame in frames.feed(data):
                writer.write(edited_frame(frame))
            await writer.drain()
