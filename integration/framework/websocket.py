"""The kubelet's streams over WebSocket: `v4.channel.k8s.io`, each message one channel's bytes behind a channel number.

Only what talking to containerd's streaming server takes: a client without extensions, short messages. Source: RFC 6455;
Kubernetes' remotecommand: channels 0 stdin, 1 stdout, 2 stderr, 3 the outcome as a Status object, 4 terminal size.
"""

from __future__ import annotations

import base64
import json
import os
import struct
from collections.abc import Iterator
from typing import Any

from .upgrade import upgraded

STDIN, STDOUT, STDERR, OUTCOME, RESIZE = range(5)
_BINARY, _CLOSE, _PING = 0x2, 0x8, 0x9


class Streams:
    """One exec, attach or port-forward connection. `messages` ends with the connection."""

    def __init__(self, url: str, within_s: float = 30.0) -> None:
        key = base64.b64encode(os.urandom(16)).decode()
        self._socket, self._file = upgraded(
            url,
            "GET",
            "websocket",
            f"Sec-WebSocket-Key: {key}",
            "Sec-WebSocket-Version: 13",
            "Sec-WebSocket-Protocol: v4.channel.k8s.io",
            within_s=within_s,
        )

    def __enter__(self) -> Streams:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._socket.close()

    def send(self, channel: int, data: bytes) -> None:
        payload = bytes([channel]) + data
        assert len(payload) < 1 << 16, "longer messages are not needed here"
        length = bytes([0x80 | len(payload)]) if len(payload) < 126 else b"\xfe" + struct.pack("!H", len(payload))
        mask = os.urandom(4)
        masked = bytes(byte ^ mask[index % 4] for index, byte in enumerate(payload))
        self._socket.sendall(bytes([0x80 | _BINARY]) + length + mask + masked)

    def resize(self, *, columns: int, rows: int) -> None:
        self.send(RESIZE, json.dumps({"Width": columns, "Height": rows}).encode())

    def messages(self) -> Iterator[tuple[int, bytes]]:
        """Each message as (channel, bytes); empty ones, which only announce a channel, are left out."""
        while head := self._file.read(2):
            opcode, size = head[0] & 0x0F, head[1] & 0x7F
            if size == 126:
                (size,) = struct.unpack("!H", self._file.read(2))
            elif size == 127:
                (size,) = struct.unpack("!Q", self._file.read(8))
            payload = self._file.read(size)
            if opcode == _CLOSE:
                return
            if opcode != _PING and len(payload) > 1:
                yield payload[0], payload[1:]

    def read_until(self, wanted: bytes, channel: int = STDOUT) -> bytes:
        """The data on `channel` up to and with the message in which `wanted` was complete."""
        seen = b""
        for number, data in self.messages():
            seen += data if number == channel else b""
            if wanted in seen:
                return seen
        raise AssertionError(f"the connection ended without {wanted!r}: {seen!r}")

    def read_all(self) -> tuple[dict[int, bytes], Any]:
        """Every channel's bytes, and the outcome object."""
        seen: dict[int, bytes] = {}
        for number, data in self.messages():
            seen[number] = seen.get(number, b"") + data
        outcome = seen.pop(OUTCOME, b"")
        return seen, json.loads(outcome) if outcome else None
