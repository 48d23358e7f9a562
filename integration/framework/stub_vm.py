"""A program in QEMU's place: answers QMP, and is a guest agent behind the descriptor of the agent's port.

It says yes to everything and boots nothing, so what a pod on it costs is the shim's work. Started once for each pod, it
imports next to nothing and reads only the fields it needs from the messages. A container whose id begins with
`flood<N>-` writes N MiB to its stdout and ends; any other runs until it is signalled; an exec ends at once.
"""

import _socket
import select
import sys

_GREETING = (
    b'{"QMP": {"version": {"qemu": {"major": 7, "minor": 2, "micro": 0}, "package": ""}, "capabilities": []}}\r\n'
)
_SNDBUFFORCE, _SEND_BYTES = 32, 8 << 20
_MIB = 1 << 20
_METRICS = b"# TYPE kata_guest_vm_stat gauge\n" + b"".join(
    b'kata_guest_vm_stat{item="item_%d"} %d\n' % (number, number * 4096) for number in range(550)
)
"""As many samples as our own guest gives for a pod of two containers, about 20 KiB."""
_ZEROS = memoryview(bytes(4 * _MIB))


def main() -> None:
    """Serves until QMP says `quit` or its client goes away."""
    listeners = {}
    for word in sys.argv:
        for name in ("qmp0", "agent0"):
            if word.startswith(f"socket,id={name},fd="):
                listeners[name] = _socket.socket(fileno=int(word.split("fd=")[1].split(",")[0]))
    qmp = _Qmp(_accept(listeners["qmp0"]))
    poll = select.poll()
    poll.register(qmp.sock, select.POLLIN)
    poll.register(listeners["agent0"], select.POLLIN)
    agent = None
    while True:
        for fd, _ in poll.poll():
            if fd == qmp.sock.fileno():
                if not qmp.serve():
                    return
            elif agent is not None and fd == agent.sock.fileno():
                if not agent.serve():
                    poll.unregister(fd)
                    agent = None
            else:
                agent = _Agent(_accept(listeners["agent0"]))
                poll.register(agent.sock, select.POLLIN)


def _accept(listener: "_socket.socket") -> "_socket.socket":
    fd, _ = listener._accept()  # type: ignore[attr-defined]  # the stubs know only socket's
    sock = _socket.socket(fileno=fd)
    sock.setblocking(True)
    return sock


def _send_all(sock: "_socket.socket", data: "bytes | memoryview") -> None:
    sock.sendall(data)


class _Qmp:
    def __init__(self, sock: "_socket.socket") -> None:
        self.sock = sock
        _send_all(sock, _GREETING)

    def serve(self) -> bool:
        """False at the end. One command comes at a time."""
        request = self.sock.recv(65536)
        if not request:
            return False
        mark = request.rfind(b'"id"')
        identity = b""
        if mark >= 0:
            identity = b', "id": "' + request[mark + 4 :].split(b'"')[1] + b'"'
        _send_all(self.sock, b'{"return": {}' + identity + b"}\r\n")
        return b'"quit"' not in request


class _Agent:
    def __init__(self, sock: "_socket.socket") -> None:
        self.sock = sock
        self._data = b""
        self._left: dict[str, int] = {}
        self._waiting: dict[str, list[int]] = {}
        self._signalled: set[str] = set()
        """Containers whose processes have ended: the exit is asked for after the end of the output."""
        try:
            sock.setsockopt(_socket.SOL_SOCKET, _SNDBUFFORCE, _SEND_BYTES)
        except OSError:
            return  # smaller pieces

    def serve(self) -> bool:
        data = self.sock.recv(1 << 20)
        if not data:
            return False
        self._data += data
        while len(self._data) >= 10:
            size = int.from_bytes(self._data[:4], "big")
            if len(self._data) < 10 + size:
                break
            stream = int.from_bytes(self._data[4:8], "big")
            request = _fields(self._data[10 : 10 + size])
            self._data = self._data[10 + size :]
            self._answer(stream, request[2].decode(), _fields(request.get(3, b"")))
        return True

    def _answer(self, stream: int, method: str, fields: "dict[int, bytes]") -> None:
        container = fields.get(1, b"").decode(errors="replace")
        exec_id = fields.get(2, b"").decode(errors="replace")
        process = f"{container}/{exec_id}"
        if method == "Check":
            self._reply(stream, b"\x08\x01")
        elif method in ("ReadStdout", "ReadStderr"):
            self._read(stream, container, process, method, int.from_bytes(fields.get(3, b""), "big"))
        elif method == "GetMetrics":
            self._reply(stream, b"\x0a" + _varint(len(_METRICS)) + _METRICS)
        elif method == "GetOOMEvent":
            return
        elif method == "WaitProcess":
            if exec_id != container or self._left.get(process) == 0 or container in self._signalled:
                self._reply(stream, b"")
            else:
                self._waiting.setdefault(process, []).append(stream)
        else:
            self._reply(stream, b"")
            if method == "CreateContainer":
                self._signalled.discard(container)
            if method == "SignalProcess":
                self._signalled.add(container)
                for other in [key for key in self._waiting if key.startswith(f"{container}/")]:
                    self._end(other)

    def _read(self, stream: int, container: str, process: str, method: str, size: int) -> None:
        flood = container.startswith("flood") and method == "ReadStdout" and process == f"{container}/{container}"
        if not flood:
            is_over = container.startswith("flood") or container in self._signalled
            if process == f"{container}/{container}" and not is_over:
                self._waiting.setdefault(process, []).append(stream)  # until the process ends
            else:
                self._reply(stream, b"")
            return
        left = self._left.setdefault(process, int(container[5:].split("-")[0]) * _MIB)
        size = min(size, left)
        self._left[process] = left - size
        if not size:
            self._reply(stream, b"")
            self._end(process)
            return
        head = b"\x0a" + _varint(size)
        before = b"\x12" + _varint(len(head) + size) + head
        _send_all(self.sock, (len(before) + size).to_bytes(4, "big") + stream.to_bytes(4, "big") + b"\x02\x00" + before)
        _send_all(self.sock, _ZEROS[:size])

    def _end(self, process: str) -> None:
        for stream in self._waiting.pop(process, []):
            self._reply(stream, b"")

    def _reply(self, stream: int, payload: bytes) -> None:
        body = b"\x12" + _varint(len(payload)) + payload
        _send_all(self.sock, len(body).to_bytes(4, "big") + stream.to_bytes(4, "big") + b"\x02\x00" + body)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _fields(data: bytes) -> "dict[int, bytes]":
    """Field number to its last value: bytes as they are, a number as eight big-endian bytes."""
    found: dict[int, bytes] = {}
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7

    while at < len(data):
        tag = number()
        if tag & 7 == 2:
            size = number()
            found[tag >> 3] = data[at : at + size]
            at += size
        elif tag & 7 == 0:
            found[tag >> 3] = number().to_bytes(8, "big")
        else:
            return found
    return found
