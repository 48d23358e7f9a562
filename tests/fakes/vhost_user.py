"""A vhost-user network back end: one queue pair, and behind it a host that answers ARP and pings.

Source: QEMU's docs/interop/vhost-user.rst; virtio 1.2, split virtqueues. Small enough to be slow: a frame at a time.
"""

import mmap
import os
import select
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.fakes.namespaces import EchoHost

_FEATURES = 1 << 32 | 1 << 30
"""VIRTIO_F_VERSION_1 and VHOST_USER_F_PROTOCOL_FEATURES; of those behind the latter there are none."""
_REPLY = 0x5
"""Version 1, and the bit of a reply."""
_NET_HEADER_BYTES = 12
_NEXT, _WRITE = 1, 2
_GET_FEATURES, _SET_MEM_TABLE, _SET_VRING_NUM, _SET_VRING_ADDR, _SET_VRING_BASE, _GET_VRING_BASE = 1, 5, 8, 9, 10, 11
_SET_VRING_KICK, _SET_VRING_CALL, _SET_VRING_ERR, _GET_PROTOCOL_FEATURES = 12, 13, 14, 15
_RECEIVE, _TRANSMIT = 0, 1


class _Region(NamedTuple):
    guest: int
    user: int
    size: int
    offset: int
    memory: mmap.mmap


class _Ring:
    def __init__(self) -> None:
        self.size = 0
        self.descriptors = self.used = self.available = 0
        self.next = 0
        self.kick = self.call = -1


class VhostUserBackend:
    """Listens at `path` from the block's start to its end; `requests` is every message's number in order."""

    def __init__(self, path: Path, host: EchoHost) -> None:
        self.requests: list[int] = []
        self._host = host
        self._path = path
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._stop_read, self._stop_write = os.pipe()
        self._thread = threading.Thread(target=self._run, name="vhost-user back end", daemon=True)
        self._regions: list[_Region] = []
        self._rings = (_Ring(), _Ring())

    def __enter__(self) -> "VhostUserBackend":
        self._listener.bind(str(self._path))
        self._listener.listen(1)
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        os.write(self._stop_write, b"x")
        self._thread.join()
        self._listener.close()
        self._path.unlink()
        os.close(self._stop_read)
        os.close(self._stop_write)

    def _run(self) -> None:
        while self._wait(self._listener.fileno()):
            connection, _ = self._listener.accept()
            with connection:
                self._serve(connection)
            self._forget()

    def _wait(self, *fds: int) -> list[int]:
        """Those that can be read; none once the block is left."""
        ready, _, _ = select.select([*fds, self._stop_read], [], [])
        return [] if self._stop_read in ready else ready

    def _serve(self, connection: socket.socket) -> None:
        while True:
            kick = self._rings[_TRANSMIT].kick
            ready = self._wait(connection.fileno(), *([kick] if kick >= 0 else []))
            if not ready:
                return
            if kick in ready:
                os.read(kick, 8)
                self._transmitted()
            if connection.fileno() in ready and not self._message(connection):
                return

    def _forget(self) -> None:
        for region in self._regions:
            region.memory.close()
        for ring in self._rings:
            for fd in (ring.kick, ring.call):
                if fd >= 0:
                    os.close(fd)
        self._regions, self._rings = [], (_Ring(), _Ring())

    # ---- the protocol

    def _message(self, connection: socket.socket) -> bool:
        header, fds, _, _ = socket.recv_fds(connection, 12, 8)
        if len(header) < 12:
            return False
        request, _, size = struct.unpack("<III", header)
        payload = connection.recv(size, socket.MSG_WAITALL) if size else b""
        self.requests.append(request)
        reply = self._answer(request, payload, fds)
        if reply:
            connection.sendall(struct.pack("<III", request, _REPLY, len(reply)) + reply)
        return True

    def _answer(self, request: int, payload: bytes, fds: list[int]) -> bytes:
        if request == _GET_FEATURES:
            return struct.pack("<Q", _FEATURES)
        if request == _GET_PROTOCOL_FEATURES:
            return bytes(8)
        if request == _SET_MEM_TABLE:
            self._map(payload, fds)
        elif request in (_SET_VRING_KICK, _SET_VRING_CALL, _SET_VRING_ERR):
            self._set_fd(request, struct.unpack("<Q", payload)[0], fds)
        elif request in (_SET_VRING_NUM, _SET_VRING_BASE, _GET_VRING_BASE):
            index, number = struct.unpack("<II", payload)
            ring = self._rings[index]
            if request == _GET_VRING_BASE:
                return struct.pack("<II", index, ring.next)
            setattr(ring, "size" if request == _SET_VRING_NUM else "next", number)
        elif request == _SET_VRING_ADDR:
            index, _, descriptors, used, available, _ = struct.unpack("<IIQQQQ", payload)
            ring = self._rings[index]
            ring.descriptors, ring.used, ring.available = descriptors, used, available
        return b""

    def _map(self, payload: bytes, fds: list[int]) -> None:
        for region in self._regions:
            region.memory.close()
        self._regions = []
        for index, fd in enumerate(fds):
            guest, size, user, offset = struct.unpack_from("<QQQQ", payload, 8 + 32 * index)
            self._regions.append(_Region(guest, user, size, offset, mmap.mmap(fd, offset + size)))
            os.close(fd)

    def _set_fd(self, request: int, word: int, fds: list[int]) -> None:
        ring, fd = self._rings[word & 0xFF], fds[0] if fds else -1
        if request == _SET_VRING_ERR:
            if fd >= 0:
                os.close(fd)
            return
        name = "kick" if request == _SET_VRING_KICK else "call"
        if (old := getattr(ring, name)) >= 0:
            os.close(old)
        setattr(ring, name, fd)

    # ---- the rings

    def _at(self, address: int, *, user: bool) -> tuple[mmap.mmap, int]:
        for region in self._regions:
            start = region.user if user else region.guest
            if start <= address < start + region.size:
                return region.memory, region.offset + address - start
        raise AssertionError(f"address {address:#x} is in no region")

    def _word(self, address: int) -> int:
        memory, at = self._at(address, user=True)
        return int(struct.unpack_from("<H", memory, at)[0])

    def _next(self, ring: _Ring) -> int | None:
        """The head of the next chain the guest made available."""
        if ring.next == self._word(ring.available + 2):
            return None
        head = self._word(ring.available + 4 + 2 * (ring.next % ring.size))
        ring.next = (ring.next + 1) & 0xFFFF
        return head

    def _chain(self, ring: _Ring, head: int) -> Iterator[tuple[int, int, bool]]:
        """(address, bytes, whether the device writes there) of each part."""
        index, more = head, True
        while more:
            memory, at = self._at(ring.descriptors + 16 * index, user=True)
            address, length, flags, index = struct.unpack_from("<QIHH", memory, at)
            yield address, length, bool(flags & _WRITE)
            more = bool(flags & _NEXT)

    def _give_back(self, ring: _Ring, head: int, length: int) -> None:
        memory, at = self._at(ring.used, user=True)
        (position,) = struct.unpack_from("<H", memory, at + 2)
        struct.pack_into("<II", memory, at + 4 + 8 * (position % ring.size), head, length)
        struct.pack_into("<H", memory, at + 2, (position + 1) & 0xFFFF)
        if ring.call >= 0:
            os.write(ring.call, struct.pack("<Q", 1))

    def _transmitted(self) -> None:
        ring = self._rings[_TRANSMIT]
        while (head := self._next(ring)) is not None:
            data = bytearray()
            for address, length, _ in self._chain(ring, head):
                memory, at = self._at(address, user=False)
                data += memory[at : at + length]
            self._give_back(ring, head, 0)
            answer = self._host.reply(bytes(data[_NET_HEADER_BYTES:]))
            if answer:
                self._deliver(struct.pack("<10xH", 1) + answer)

    def _deliver(self, data: bytes) -> None:
        ring = self._rings[_RECEIVE]
        head = self._next(ring)
        if head is None:
            return  # as a switch drops what a port has no room for
        left = data
        for address, length, writable in self._chain(ring, head):
            if writable:
                memory, at = self._at(address, user=False)
                memory[at : at + len(left[:length])] = left[:length]
                left = left[length:]
        self._give_back(ring, head, len(data))
