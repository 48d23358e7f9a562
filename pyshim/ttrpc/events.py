"""Reports of the protocol core about received bytes. Plain slotted classes: cheap to define, cheap to make."""

from __future__ import annotations

from typing import TypeAlias

from .status import TtrpcError

Metadata: TypeAlias = tuple[tuple[str, str], ...]


class Event:
    """Base of all events. Two events are equal when they are of one class and their fields are."""

    __slots__ = ("stream_id",)

    def __init__(self, stream_id: int) -> None:
        self.stream_id = stream_id

    def _fields(self) -> list[str]:
        return ["stream_id", *self.__slots__] if type(self) is not Event else ["stream_id"]

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in self._fields())

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in self._fields())})"


class RequestReceived(Event):
    """A client opened a stream. `timeout_ns` is relative to now; 0 means none."""

    __slots__ = ("metadata", "method", "payload", "service", "timeout_ns")

    def __init__(
        self,
        stream_id: int,
        service: str,
        method: str,
        payload: bytes,
        timeout_ns: int = 0,
        metadata: Metadata = (),
    ) -> None:
        self.stream_id = stream_id
        self.service = service
        self.method = method
        self.payload = payload
        self.timeout_ns = timeout_ns
        self.metadata = metadata


class RequestRefused(Event):
    """The core refuses a frame of the client; `reply` is the frame that says so and is to be sent.

    `ended` says that an open stream ended by this: its handler must not answer any more.
    """

    __slots__ = ("code", "ended", "message", "reply")

    def __init__(self, stream_id: int, code: int, message: str, reply: bytes, ended: bool) -> None:
        self.stream_id = stream_id
        self.code = code
        self.message = message
        self.reply = reply
        self.ended = ended


class ResponseReceived(Event):
    """The server's final answer; the stream is over and forgotten. `code` 0 is success."""

    __slots__ = ("code", "details", "message", "payload")

    def __init__(
        self, stream_id: int, payload: bytes, code: int = 0, message: str = "", details: tuple[bytes, ...] = ()
    ) -> None:
        self.stream_id = stream_id
        self.payload = payload
        self.code = code
        self.message = message
        self.details = details


class StreamFailed(Event):
    """The server's answer on a stream of ours cannot be used; the stream is over and forgotten."""

    __slots__ = ("error",)

    def __init__(self, stream_id: int, error: TtrpcError) -> None:
        self.stream_id = stream_id
        self.error = error
