"""Connecting to a Unix socket from an event loop."""

from __future__ import annotations

import asyncio
import socket

CROWDED_PAUSE_S = 0.05


async def connected_unix_socket(path: str) -> socket.socket:
    """A connected, non-blocking stream socket, once the listener at `path` has room for one more. Raises OSError.

    Not asyncio's `sock_connect`: where the listen queue is full it takes the kernel's EAGAIN for a connect under way,
    and the socket, which is writable because nothing is connected to it, for its success. The kernel tells nobody when
    there is room, so the limit of this wait is the caller's.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        while True:
            try:
                sock.connect(path)
                return sock
            except BlockingIOError:
                await asyncio.sleep(CROWDED_PAUSE_S)
    except BaseException:
        sock.close()
        raise
