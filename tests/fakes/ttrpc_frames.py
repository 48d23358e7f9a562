"""Frames of ttrpc as one `bytes`, for peers that are plain sockets."""

from pyshim.ttrpc.connection import ServerConnection
from pyshim.ttrpc.framing import Buffer


def response(core: ServerConnection, stream_id: int, payload: Buffer = b"") -> bytes:
    """The frame that ends a stream of `core` with success."""
    return b"".join(core.response_parts(stream_id, payload))
