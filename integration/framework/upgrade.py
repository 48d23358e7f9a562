"""A connection to containerd's streaming server: an HTTP request that makes a connection one of another protocol."""

from __future__ import annotations

import socket
from typing import BinaryIO
from urllib.parse import urlsplit


def upgraded(url: str, request: str, protocol: str, *headers: str, within_s: float) -> tuple[socket.socket, BinaryIO]:
    """A connection on which `protocol` is spoken, and a reader of what comes. `request` is the method.

    Raises AssertionError when the server does not switch. `within_s` is the limit of each read and write.
    """
    place = urlsplit(url)
    assert place.hostname, url
    connection = socket.create_connection((place.hostname, place.port or 80), timeout=within_s)
    file = connection.makefile("rb")
    query = f"?{place.query}" if place.query else ""
    lines = (
        f"{request} {place.path}{query} HTTP/1.1",
        f"Host: {place.netloc}",
        "Connection: Upgrade",
        f"Upgrade: {protocol}",
        *headers,
    )
    connection.sendall("\r\n".join((*lines, "", "")).encode())
    status = file.readline()
    while file.readline().strip():
        pass
    assert b" 101 " in status, f"no {protocol} at {url}: {status!r}"
    return connection, file
