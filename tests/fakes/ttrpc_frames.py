"""Frames of ttrpc as one `bytes`, for peers that are plain sockets."""

from typing import Any

from pyshim.ttrpc.connection import ClientConnection, ServerConnection
from pyshim.ttrpc.framing import Buffer


def request_frame(
    core: ClientConnection, service: str, method: str, payload: Buffer, **options: Any
) -> tuple[int, bytes]:
    """The id of a new stream of `core`, and the frame that opens it."""
    stream_id, parts = core.request_parts(service, method, payload, **options)
    return stream_id, b"".join(parts)


def response_frame(core: ServerConnection, stream_id: int, payload: Buffer = b"") -> bytes:
    """The frame that ends a stream of `core` with success."""
    return b"".join(core.response_parts(stream_id, payload))
