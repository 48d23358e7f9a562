"""The kubelet's port-forward through CRI: one connection to one port of a pod, over the streaming server's WebSocket.

Source: Kubernetes' portforward package: channel 0 is the port's data and 1 its errors; the first message of each is the
port number in two bytes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from .cri import Pod
from .websocket import Streams

DATA, ERROR = range(2)
_CHUNK = 32768


@dataclass(slots=True)
class Forwarded:
    """The kubelet's end of one forwarded connection."""

    streams: Streams

    def send(self, data: bytes) -> None:
        for start in range(0, len(data), _CHUNK):
            self.streams.send(DATA, data[start : start + _CHUNK])

    def read_until(self, wanted: bytes) -> bytes:
        return self.streams.read_until(wanted, DATA)

    def read(self, count: int) -> bytes:
        """Exactly `count` bytes, or fewer at the connection's end."""
        seen = b""
        for channel, data in self.streams.messages():
            seen += data if channel == DATA else b""
            if len(seen) >= count:
                break
        return seen

    def read_to_end(self) -> tuple[bytes, str]:
        """Everything the pod said until the connection ended, and what went wrong in the kubelet's eyes."""
        seen = {DATA: b"", ERROR: b""}
        for channel, data in self.streams.messages():
            seen[channel] += data
        return seen[DATA], seen[ERROR].decode()


@contextlib.contextmanager
def forward(pod: Pod, port: int) -> Iterator[Forwarded]:
    """A connection to `port` of the pod, as `kubectl port-forward` makes one for each client."""
    url: str = pod.cri.call("PortForward", pod_sandbox_id=pod.id, port=[port]).url
    with Streams(f"{url}?port={port}") as streams:
        announced = set()
        for channel, data in streams.messages():
            assert data == port.to_bytes(2, "little"), (channel, data)
            announced.add(channel)
            if len(announced) == 2:
                break
        yield Forwarded(streams)
