"""The kubelet's own way to a container's streams and a pod's ports: SPDY/3.1 to containerd's streaming server.

Only what that takes: streams opened by the client, data both ways, the end. Sources: the SPDY/3.1 draft, sections 2.2
(frames) and 2.6.10 (name/value block); Kubernetes' remotecommand and portforward packages for the streams' headers.
A compressed block need not use the protocol's dictionary, and the server's blocks say nothing that is needed here.
"""

from __future__ import annotations

import socket
import struct
import zlib
from collections.abc import Mapping
from typing import Self
from urllib.parse import urlsplit

EXEC, PORT_FORWARD = "v4.channel.k8s.io", "portforward.k8s.io"
_SYN_STREAM, _RST_STREAM, _PING = 1, 3, 6
_CONTROL = 0x8003
_FIN = 0x01
_CHUNK = 32768


class SpdyConnection:
    """One upgraded connection. `data` is what has come on each stream so far, `ended` are the streams that are over."""

    def __init__(self, url: str, protocol: str, within_s: float = 60.0) -> None:
        place = urlsplit(url)
        self._socket = socket.create_connection((str(place.hostname), place.port or 80), timeout=within_s)
        self._file = self._socket.makefile("rb")
        lines = (
            f"POST {place.path}?{place.query} HTTP/1.1",
            f"Host: {place.netloc}",
            *("Connection: Upgrade", "Upgrade: SPDY/3.1", "Content-Length: 0"),
            f"X-Stream-Protocol-Version: {protocol}",
        )
        self._socket.sendall("\r\n".join((*lines, "", "")).encode())
        status = self._file.readline()
        while self._file.readline().strip():
            pass
        assert b" 101 " in status, f"no SPDY at {url}: {status!r}"
        self._headers = zlib.compressobj()
        self._next_id = 1
        self.data: dict[int, bytes] = {}
        self.ended: set[int] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._socket.close()

    def open(self, headers: Mapping[str, str]) -> int:
        """A new stream's id."""
        block = struct.pack("!I", len(headers))
        for name, value in headers.items():
            for text in (name.encode(), value.encode()):
                block += struct.pack("!I", len(text)) + text
        packed = self._headers.compress(block) + self._headers.flush(zlib.Z_SYNC_FLUSH)
        stream, self._next_id = self._next_id, self._next_id + 2
        self._send_control(_SYN_STREAM, struct.pack("!IIBB", stream, 0, 0, 0) + packed)
        self.data[stream] = b""
        return stream

    def send(self, stream: int, data: bytes, *, end: bool = False) -> None:
        pieces = [data[start : start + _CHUNK] for start in range(0, len(data), _CHUNK)] or [b""]
        for number, piece in enumerate(pieces, 1):
            flags = _FIN if end and number == len(pieces) else 0
            self._socket.sendall(struct.pack("!II", stream, flags << 24 | len(piece)) + piece)

    def read(self, stream: int, count: int) -> bytes:
        """The stream's first `count` bytes, or all it has said when it is over."""
        while len(self.data[stream]) < count and stream not in self.ended and self._read_frame():
            pass
        return self.data[stream][:count]

    def read_until(self, stream: int, wanted: bytes) -> None:
        while wanted not in self.data[stream]:
            assert self._read_frame(), f"the connection ended without {wanted!r}: {self.data}"

    def read_to_end(self, stream: int) -> bytes:
        while stream not in self.ended and self._read_frame():
            pass
        return self.data[stream]

    def _send_control(self, kind: int, body: bytes) -> None:
        self._socket.sendall(struct.pack("!HHI", _CONTROL, kind, len(body)) + body)

    def _read_frame(self) -> bool:
        """False once the connection has ended."""
        head = self._file.read(8)
        if len(head) < 8:
            return False
        first, second = struct.unpack("!II", head)
        flags, body = second >> 24, self._file.read(second & 0xFFFFFF)
        if not first >> 31:
            self.data[first] = self.data.get(first, b"") + body
            if flags & _FIN:
                self.ended.add(first)
            return True
        kind = first & 0xFFFF
        if kind == _PING:
            self._send_control(_PING, body)
        elif kind == _RST_STREAM:
            self.ended.add(struct.unpack("!I", body[:4])[0] & 0x7FFFFFFF)
        return True
