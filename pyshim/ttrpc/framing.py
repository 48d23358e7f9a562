"""Frames: a 10-byte header (payload length u32, stream id u32, type u8, flags u8, big endian) and the payload."""

from __future__ import annotations

from collections.abc import Callable
from mmap import MAP_PRIVATE, mmap
from struct import Struct
from typing import NamedTuple, TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview

HEADER = Struct(">IIBB")
HEADER_BYTES = HEADER.size
MAX_MESSAGE_BYTES = 4 << 20

REQUEST = 1
RESPONSE = 2
DATA = 3

FLAG_REMOTE_OPEN = 0x2
"""On a request: the sender will send data frames. The other flags, 0x1 and 0x4, have no meaning in a unary call."""

MAX_STREAM_ID = 0xFFFFFFFF

_SCRATCH_BYTES = 64 << 10
"""Bytes of the buffer for small frames, made at the first read. Only those that are received take memory."""
_DIRECT_BYTES = 16 << 10
"""Missing bytes of a frame from which on they are received into its own buffer, without a copy."""
_FIRST_BYTES = 64 << 10
"""Bytes set aside for a frame that has begun; doubled as bytes arrive, so that a header alone costs little memory."""
_NOTHING = memoryview(b"")


class Frame(NamedTuple):
    """One received frame. `payload` is a view that is valid until the reader is fed again.

    `discarded_bytes` is 0, or the announced length of a frame over the limit, whose payload is thrown away.
    """

    stream_id: int
    type: int
    flags: int
    payload: memoryview
    discarded_bytes: int = 0


class FrameReader:
    """Cuts a byte stream into frames and holds at most one unfinished frame, never one over the limit.

    Two ways in: `feed(data)`; or, without a copy of large payloads, receive into `buffer()` and then say
    `received(count)`.
    """

    __slots__ = (
        "_filled",
        "_head",
        "_length",
        "_limit_bytes",
        "_limit_of",
        "_pending",
        "_scratch",
        "_skip_bytes",
        "_view",
    )

    def __init__(self, limit_bytes: int = MAX_MESSAGE_BYTES, *, limit_of: Callable[[int], int] | None = None) -> None:
        """`limit_of` gives the limit for the frames of a stream; it is asked when a header has come."""
        self._limit_bytes = limit_bytes
        self._limit_of = limit_of
        self._length = 0
        self._head = bytearray()
        self._pending = (0, 0, 0)
        self._view: memoryview | None = None
        self._filled = 0
        self._skip_bytes = 0
        self._scratch: memoryview | None = None

    @property
    def buffered_bytes(self) -> int:
        """Bytes set aside for the unfinished frame."""
        return len(self._head) + (0 if self._view is None else len(self._view))

    @property
    def mid_frame(self) -> bool:
        """True when a stream that ended now would be cut inside a frame."""
        return bool(self._head) or self._view is not None or self._skip_bytes > 0

    def feed(self, data: Buffer) -> list[Frame]:
        """Frames completed by `data`. A frame over the limit is reported as soon as its header is known."""
        frames: list[Frame] = []
        chunk = memoryview(data)
        position, end = 0, len(chunk)
        while position < end:
            if self._skip_bytes:
                step = min(self._skip_bytes, end - position)
                self._skip_bytes -= step
                position += step
            elif self._view is not None:
                step = min(len(self._view) - self._filled, end - position)
                self._view[self._filled : self._filled + step] = chunk[position : position + step]
                position += step
                self._advance(step, frames)
            elif self._head or end - position < HEADER_BYTES:
                step = min(HEADER_BYTES - len(self._head), end - position)
                self._head += chunk[position : position + step]
                position += step
                if len(self._head) == HEADER_BYTES:
                    length, stream_id, type_, flags = HEADER.unpack(self._head)
                    self._head.clear()
                    position = self._begin(length, stream_id, type_, flags, chunk, position, frames)
            else:
                length, stream_id, type_, flags = HEADER.unpack_from(chunk, position)
                position = self._begin(length, stream_id, type_, flags, chunk, position + HEADER_BYTES, frames)
        return frames

    def buffer(self) -> memoryview:
        """The buffer for the next bytes of the stream. Never empty; valid until `received` or `feed` is called."""
        if self._view is not None and self._length - self._filled >= _DIRECT_BYTES:
            return self._view[self._filled :]
        if self._scratch is None:
            # Not a bytearray, whose zeros would take all of the memory at once.
            self._scratch = memoryview(mmap(-1, _SCRATCH_BYTES, MAP_PRIVATE))
        return self._scratch

    def received(self, count: int) -> list[Frame]:
        """Frames completed by `count` bytes that were just received into `buffer()`."""
        if self._view is not None and self._length - self._filled >= _DIRECT_BYTES:
            frames: list[Frame] = []
            self._advance(count, frames)
            return frames
        if self._scratch is None:
            return []
        return self.feed(self._scratch[:count])

    def _begin(
        self, length: int, stream_id: int, type_: int, flags: int, chunk: memoryview, position: int, frames: list[Frame]
    ) -> int:
        limit_bytes = self._limit_bytes if self._limit_of is None else self._limit_of(stream_id)
        if length > limit_bytes:
            self._skip_bytes = length
            frames.append(Frame(stream_id, type_, flags, _NOTHING, length))
            return position
        if length <= len(chunk) - position:
            frames.append(Frame(stream_id, type_, flags, chunk[position : position + length]))
            return position + length
        self._view = memoryview(bytearray(min(length, _FIRST_BYTES)))
        self._length = length
        self._filled = 0
        self._pending = (stream_id, type_, flags)
        return position

    def _advance(self, count: int, frames: list[Frame]) -> None:
        assert self._view is not None
        self._filled += count
        if self._filled == self._length:
            frames.append(Frame(*self._pending, self._view))
            self._view = None
        elif self._filled == len(self._view):
            grown = memoryview(bytearray(min(self._length, 2 * len(self._view))))
            grown[: self._filled] = self._view
            self._view = grown
