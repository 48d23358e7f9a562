"""Status codes and exceptions. Every exception carries a `code`, so it can be answered on the wire without a table."""

from __future__ import annotations


class Code:
    """Status codes of ttrpc replies: the gRPC numbers (google.rpc.Code).

    Plain numbers, no enum: a peer may send any number.
    """

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class TtrpcError(Exception):
    """A failed call. `code` is one of `Code`, or whatever number a peer sent."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message

    def __str__(self) -> str:
        return self.message


class LocalProtocolError(TtrpcError):
    """This side used the protocol wrongly, for example answered a stream twice: a bug here, nothing was sent."""

    def __init__(self, message: str) -> None:
        super().__init__(Code.INTERNAL, message)


class RemoteProtocolError(TtrpcError):
    """The peer broke the protocol; what it meant is unknown."""

    def __init__(self, message: str) -> None:
        super().__init__(Code.INTERNAL, message)


class MessageTooLarge(TtrpcError):
    """A message over the size limit: one of ours that was not sent, or one of the peer's that was discarded."""

    def __init__(self, message: str) -> None:
        super().__init__(Code.RESOURCE_EXHAUSTED, message)


class CallTimedOut(TtrpcError):
    """The deadline passed on this side. The peer may still carry the call out: ttrpc has no cancel message."""

    def __init__(self, message: str) -> None:
        super().__init__(Code.DEADLINE_EXCEEDED, message)


class ConnectionClosed(TtrpcError):
    """The connection is gone and the request never left this side: it was not carried out."""

    def __init__(self, message: str) -> None:
        super().__init__(Code.UNAVAILABLE, message)


class OutcomeUnknown(ConnectionClosed):
    """The connection dropped between request and reply: the call may have been carried out, or not."""


class RemoteError(TtrpcError):
    """The peer answered with a status other than OK."""
