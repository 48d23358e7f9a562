"""Listeners on Unix sockets that misbehave."""

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def crowded(path: str) -> Iterator[None]:
    """A listener at `path` accepts no connection, and its backlog is full."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(path)
        listener.listen(0)
        while True:
            waiting = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
            try:
                waiting.connect(path)
            except BlockingIOError:
                break
        yield
