"""Reports of the protocol core about received bytes."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from .status import TtrpcError

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
