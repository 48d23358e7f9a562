"""The protocol without I/O: bytes in, events out; calls in, bytes out. One class per role.

Theory of operation. A stream is one call: it begins with a client's request and has an odd id above all earlier ones.
It ends for the server when it sends the response; for the client when it receives it, or forgets the stream.

    server:  (absent) --request--> open --response sent | refused--> (absent)
    client:  (absent) --request sent--> open --response | unusable frame | forget--> (absent)

Streams of messages (data frames, in ttrpc since 1.2) are not implemented: a request that announces them is answered
UNIMPLEMENTED, and a data frame fails its call.

Received bytes never raise: each frame says its length, so a frame that cannot be used (too large, malformed, bad stream
id, unknown type) is answered or ignored alone. Only a server that floods its client with such frames is disconnected
(`ClientConnection.flood`). State is bounded: one unfinished
frame and one entry per open stream. Source: containerd/ttrpc PROTOCOL.md and server.go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeAlias

from .framing import (
    DATA,
    FLAG_REMOTE_OPEN,
    HEADER,
    MAX_MESSAGE_BYTES,
    MAX_STREAM_ID,
    REQUEST,
    RESPONSE,
    Buffer,
    Frame,
    FrameReader,
)
from .messages import (
    MalformedMessage,
    Parts,
    decode_request,
    decode_response,
    encode_error,
    encode_request,
    encode_response,
)
from .status import Code, LocalProtocolError, MessageTooLarge, RemoteProtocolError, TtrpcError

Metadata: TypeAlias = tuple[tuple[str, str], ...]


class RequestReceived(NamedTuple):
    """A client opened a stream. `timeout_ns` is relative to now; 0 means none."""

    stream_id: int
    service: str
    method: str
    payload: bytes
    timeout_ns: int = 0
    metadata: Metadata = ()


class RequestRefused(NamedTuple):
    """The core refuses a frame of the client, which ends its stream; `reply` is the frame to send."""

    stream_id: int
    code: int
    message: str
    reply: bytes


class ResponseReceived(NamedTuple):
    """The server's final answer; the stream is over and forgotten. `code` 0 is success."""

    stream_id: int
    payload: bytes
    code: int = 0
    message: str = ""


class StreamFailed(NamedTuple):
    """The server's answer on a stream of ours cannot be used; the stream is over and forgotten."""

    stream_id: int
    error: TtrpcError


Event: TypeAlias = RequestReceived | RequestRefused | ResponseReceived | StreamFailed


MAX_OPEN_STREAMS = 1024
"""Open streams of one connection: containerd has one Wait for each process, and few other calls."""


MAX_STRAY_FRAMES = 1024
"""Frames that answer nothing before the client ends the connection. A server sends none, but the one late answer of a
call that was given up."""


class _Connection:
    """The reading side and the limits, which both roles share."""

    __slots__ = ("_max_message_bytes", "_reader", "_streams", "ignored_frames")

    def __init__(self, max_message_bytes: int, limit_of: Callable[[int], int] | None = None) -> None:
        self._max_message_bytes = max_message_bytes
        self._reader = FrameReader(max_message_bytes, limit_of=limit_of)
        self._streams: set[int] = set()
        self.ignored_frames = 0
        """Frames that were dropped because they have no meaning in this state."""

    @property
    def buffered_bytes(self) -> int:
        """Bytes buffered for an unfinished frame: at most the message limit."""
        return self._reader.buffered_bytes

    @property
    def open_streams(self) -> int:
        return len(self._streams)

    def is_open(self, stream_id: int) -> bool:
        return stream_id in self._streams

    def receive_data(self, data: Buffer) -> list[Event]:
        """The events in `data`, the next bytes of the peer."""
        return self._events(self._reader.feed(data))

    def receive_buffer(self) -> memoryview:
        """A buffer to receive into instead of calling `receive_data`: saves a copy of large payloads."""
        return self._reader.buffer()

    def received(self, count: int) -> list[Event]:
        """The events in the `count` bytes (at least 1) just received into `receive_buffer()`."""
        return self._events(self._reader.received(count))

    def receive_eof(self) -> RemoteProtocolError | None:
        """The complaint about a peer that ended inside a frame, if it did. All streams are over."""
        self._streams.clear()
        return RemoteProtocolError("connection ended inside a frame") if self._reader.mid_frame else None

    @property
    def flood(self) -> RemoteProtocolError | None:
        """The complaint about a peer that floods us with frames without meaning."""
        return None

    def _events(self, frames: list[Frame]) -> list[Event]:
        events: list[Event] = []
        for frame in frames:
            event = self._on_frame(frame)
            if event is None:
                self.ignored_frames += 1
            else:
                events.append(event)
        return events

    def _on_frame(self, frame: Frame) -> Event | None:
        raise NotImplementedError

    def _frame(self, stream_id: int, type_: int, message: Parts) -> bytes:
        length = sum(map(len, message))
        if length > self._max_message_bytes:
            raise MessageTooLarge(f"message of {length} bytes exceeds the limit of {self._max_message_bytes}")
        return b"".join((HEADER.pack(length, stream_id, type_, 0), *message))


class ServerConnection(_Connection):
    """The server's end. Reports RequestReceived and RequestRefused."""

    __slots__ = ("_last_stream_id", "_max_open_streams")

    def __init__(self, *, max_message_bytes: int = MAX_MESSAGE_BYTES, max_open_streams: int = MAX_OPEN_STREAMS) -> None:
        super().__init__(max_message_bytes)
        self._max_open_streams = max_open_streams
        self._last_stream_id = 0

    def response(self, stream_id: int, payload: Buffer) -> bytes:
        """The frame that ends a stream with success.

        Raises MessageTooLarge and leaves the stream open when the reply exceeds the limit.
        """
        self._require_open(stream_id)
        frame = self._frame(stream_id, RESPONSE, encode_response(payload))
        self._streams.remove(stream_id)
        return frame

    def error(self, stream_id: int, code: int, message: str) -> bytes:
        """The frame that ends a stream with a status. Code 0 means OK, so it is sent as UNKNOWN."""
        self._require_open(stream_id)
        frame = self._frame(stream_id, RESPONSE, encode_error(code or Code.UNKNOWN, message))
        self._streams.remove(stream_id)
        return frame

    def _require_open(self, stream_id: int) -> None:
        if stream_id not in self._streams:
            raise LocalProtocolError(f"answer stream {stream_id}: not open")

    def _on_frame(self, frame: Frame) -> Event | None:
        if frame.type == REQUEST:
            return self._on_request(frame)
        if frame.type == DATA:
            return self._on_data(frame)
        return None

    def _on_request(self, frame: Frame) -> Event:
        stream_id = frame.stream_id
        if not stream_id & 1:
            return self._refuse(stream_id, Code.INVALID_ARGUMENT, f"open stream {stream_id}: id must be odd")
        if stream_id <= self._last_stream_id:
            message = f"open stream {stream_id}: id must be above {self._last_stream_id}"
            return self._refuse(stream_id, Code.INVALID_ARGUMENT, message)
        self._last_stream_id = stream_id
        if frame.discarded_bytes:
            message = f"message of {frame.discarded_bytes} bytes exceeds the limit of {self._max_message_bytes}"
            return self._refuse(stream_id, Code.RESOURCE_EXHAUSTED, message)
        if frame.flags & FLAG_REMOTE_OPEN:
            return self._refuse(stream_id, Code.UNIMPLEMENTED, f"open stream {stream_id}: streaming is not implemented")
        if len(self._streams) >= self._max_open_streams:
            message = f"open stream {stream_id}: {self._max_open_streams} streams are open already"
            return self._refuse(stream_id, Code.RESOURCE_EXHAUSTED, message)
        try:
            request = decode_request(frame.payload)
        except MalformedMessage as exc:
            return self._refuse(stream_id, Code.INVALID_ARGUMENT, f"decode request: {exc}")
        self._streams.add(stream_id)
        # A timeout of zero or below means none, as in the Go server.
        timeout_ns = max(request.timeout_nano, 0)
        metadata = tuple((pair.key, pair.value) for pair in request.metadata)
        return RequestReceived(stream_id, request.service, request.method, request.payload, timeout_ns, metadata)

    def _on_data(self, frame: Frame) -> Event | None:
        stream_id = frame.stream_id
        if stream_id not in self._streams:
            if stream_id & 1 and stream_id <= self._last_stream_id:
                return None  # the client sent it before our final answer arrived
            return self._refuse(stream_id, Code.INVALID_ARGUMENT, f"data on stream {stream_id}: never opened")
        message = f"data on stream {stream_id}: the client had closed its side"
        return self._refuse(stream_id, Code.INVALID_ARGUMENT, message)

    def _refuse(self, stream_id: int, code: int, message: str) -> RequestRefused:
        reply = self._frame(stream_id, RESPONSE, encode_error(code, message))
        self._streams.discard(stream_id)
        return RequestRefused(stream_id, code, message, reply)


class ClientConnection(_Connection):
    """The client's end. Reports ResponseReceived and StreamFailed, and only for open streams."""

    __slots__ = ("_limits", "_next_stream_id", "late_frames")

    def __init__(self, *, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        # A frame of a stream that is not open is dropped, so none of it is buffered.
        super().__init__(max_message_bytes, lambda stream_id: self._limits.get(stream_id, 0))
        self._limits: dict[int, int] = {}
        """The largest reply of each open stream, in bytes."""
        self._next_stream_id = 1
        self.late_frames = 0
        """Frames for streams that are over or were forgotten, dropped."""

    def request(
        self,
        service: str,
        method: str,
        payload: Buffer,
        *,
        timeout_ns: int = 0,
        metadata: Iterable[tuple[str, str]] = (),
        max_reply_bytes: int | None = None,
    ) -> tuple[int, bytes]:
        """The new stream's id and the frame that opens it. Raises MessageTooLarge; then no id is used up.

        Frames must be written in the order they were made: the peer wants rising ids. A reply above `max_reply_bytes`,
        envelope included, fails the call and is neither buffered nor decoded.
        """
        stream_id = self._next_stream_id
        if stream_id > MAX_STREAM_ID:
            raise LocalProtocolError("open stream: all stream ids of this connection are used up")
        try:
            message = encode_request(service, method, payload, timeout_ns, metadata)
        except UnicodeEncodeError as exc:
            raise LocalProtocolError(f"call '{service}/{method}': text is not UTF-8") from exc
        frame = self._frame(stream_id, REQUEST, message)
        self._next_stream_id = stream_id + 2
        self._streams.add(stream_id)
        limit_bytes = self._max_message_bytes
        self._limits[stream_id] = limit_bytes if max_reply_bytes is None else min(max_reply_bytes, limit_bytes)
        return stream_id, frame

    def forget(self, stream_id: int) -> None:
        """Late frames of this stream are dropped from now on. Does nothing for a stream that is over."""
        self._streams.discard(stream_id)
        self._limits.pop(stream_id, None)

    @property
    def flood(self) -> RemoteProtocolError | None:
        streams = self._next_stream_id // 2
        if self.ignored_frames <= streams + MAX_STRAY_FRAMES:
            return None
        return RemoteProtocolError(f"{self.ignored_frames} frames answer no call")

    def _on_frame(self, frame: Frame) -> Event | None:
        stream_id = frame.stream_id
        if stream_id not in self._streams or frame.type not in (RESPONSE, DATA):
            if frame.type in (RESPONSE, DATA) and stream_id & 1 and stream_id < self._next_stream_id:
                self.late_frames += 1
            return None
        if frame.discarded_bytes:
            message = f"reply of {frame.discarded_bytes} bytes exceeds the limit of {self._limits[stream_id]}"
            return self._fail(stream_id, MessageTooLarge(message))
        if frame.type == RESPONSE:
            return self._on_response(frame)
        return self._fail(stream_id, RemoteProtocolError("data frame as reply to a unary call"))

    def _on_response(self, frame: Frame) -> Event:
        stream_id = frame.stream_id
        try:
            response = decode_response(frame.payload)
        except MalformedMessage as exc:
            return self._fail(stream_id, RemoteProtocolError(f"decode response: {exc}"))
        self.forget(stream_id)
        return ResponseReceived(stream_id, response.payload, response.code, response.message)

    def _fail(self, stream_id: int, error: MessageTooLarge | RemoteProtocolError) -> StreamFailed:
        self.forget(stream_id)
        return StreamFailed(stream_id, error)
