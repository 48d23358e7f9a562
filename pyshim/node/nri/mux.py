"""NRI's multiplexed connection: several byte streams, each with a number, over one stream socket.

A frame is the number of its stream and the length of its payload, both 4 bytes big-endian, and the payload, of one
ttrpc message at most. Streams are not opened or closed on the wire; each side assumes that the other serves them.
`FrameReader` is the protocol without I/O. `Mux` gives each stream an end of a socket pair: what runs on a socket runs
on a stream, and the kernel limits the bytes that wait for a slow reader. Source: containerd/nri pkg/net/multiplex.
"""

import asyncio
import errno
import socket
import struct

from pyshim.concurrency.tasks import cancel_all

PLUGIN_SERVICE = 1
"""The stream on which the plugin serves and the runtime calls."""
RUNTIME_SERVICE = 2
"""The stream on which the runtime serves and the plugin calls."""
HEADER = struct.Struct(">II")
MAX_PAYLOAD_BYTES = 10 + (4 << 20)
"""Header and body of the largest ttrpc message, the most that a peer sends in one frame."""
SENT_PAYLOAD_BYTES = 4096
"""The Go implementation reads a frame with one call, into 4096 bytes, and disconnects after a larger one."""
_READ_BYTES = 64 << 10


class MuxError(Exception):
    """The peer broke the framing, or the connection failed."""


class MuxFrameReader:
    """Splits bytes into payloads. It buffers at most a frame's header: payload is returned as it arrives."""

    def __init__(self) -> None:
        self._header = b""
        self._stream = 0
        self._left = 0

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """The parts of payloads in `data`, each with the number of its stream. Raises MuxError."""
        parts = []
        view = memoryview(data)
        while view:
            if self._left:
                part, view = view[: self._left], view[self._left :]
                self._left -= len(part)
                parts.append((self._stream, bytes(part)))
                continue
            missing = HEADER.size - len(self._header)
            self._header += view[:missing]
            view = view[missing:]
            if len(self._header) == HEADER.size:
                self._stream, self._left = HEADER.unpack(self._header)
                self._header = b""
                if not self._stream:
                    raise MuxError("read frame: its stream has the number 0, which is reserved")
                if self._left > MAX_PAYLOAD_BYTES:
                    raise MuxError(f"read frame: {self._left} bytes exceed the limit of {MAX_PAYLOAD_BYTES}")
        return parts

    def end(self) -> None:
        """The peer will send no more. Raises MuxError inside a frame."""
        if self._header or self._left:
            raise MuxError("read frame: the connection ended inside a frame")


class Mux:
    """Owns a connected stream socket. `open` streams, then `run`."""

    def __init__(self, trunk: socket.socket) -> None:
        trunk.setblocking(False)
        self._trunk = trunk
        self._sending = asyncio.Lock()
        self._far_ends: dict[int, socket.socket] = {}

    def open(self, stream: int) -> socket.socket:
        """The stream of this number, as a connected socket, which the caller owns."""
        near, far = socket.socketpair()
        far.setblocking(False)
        self._far_ends[stream] = far
        return near

    async def run(self) -> None:
        """Carries bytes until the peer or the owner of a stream ends; then all is closed. Raises MuxError.

        Bytes that a stream's owner wrote before it closed are sent. Bytes for streams that are not open are dropped.
        """
        work = [self._receive(), *(self._send(stream, far) for stream, far in self._far_ends.items())]
        tasks = [asyncio.ensure_future(each) for each in work]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
        except OSError as error:
            name = errno.errorcode.get(error.errno or 0, str(error))
            raise MuxError(f"the connection failed: {name}") from error
        finally:
            await cancel_all(*tasks)
            self._trunk.close()
            for far in self._far_ends.values():
                far.close()

    async def _receive(self) -> None:
        loop = asyncio.get_running_loop()
        reader = MuxFrameReader()
        while data := await loop.sock_recv(self._trunk, _READ_BYTES):
            for stream, part in reader.feed(data):
                if far := self._far_ends.get(stream):
                    # A slow owner delays all streams. Owners do not wait for each other, so there is no deadlock.
                    await loop.sock_sendall(far, part)
        reader.end()

    async def _send(self, stream: int, far: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while data := await loop.sock_recv(far, SENT_PAYLOAD_BYTES):
            async with self._sending:
                await loop.sock_sendall(self._trunk, HEADER.pack(stream, len(data)) + data)
