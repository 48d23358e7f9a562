"""Attackers of the node's HTTP services: callers that hold connections, send bombs, and ask without reading."""

import gzip
import json
import socket
import ssl
import struct
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingUnixStreamServer
from threading import Thread
from typing import NamedTuple

from pyshim.model.units import MIB

_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: the end of the connection is a reset."""
_PIECE_BYTES = 64 << 10
_PAUSE_S = 0.02


class Flood(NamedTuple):
    """`callers` connections at once that send `sent` and read nothing, for `seconds`; half of them end by a reset."""

    callers: int
    sent: bytes = b""
    seconds: float = 1.0


def flood(connect: Callable[[], socket.socket], what: Flood) -> int:
    """The number of connections that `connect` made and that sent all, or were still taken from, at the end."""
    callers = []
    try:
        for _ in range(what.callers):
            with suppress(OSError):
                callers.append(connect())
                if not what.seconds:
                    callers.pop().close()
        left = {caller: memoryview(what.sent) for caller in callers}
        until_s = time.monotonic() + what.seconds
        while time.monotonic() < until_s:
            for caller, rest in tuple(left.items()):
                try:
                    left[caller] = rest[caller.send(rest[:_PIECE_BYTES]) :] if rest else rest
                except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    continue
                except OSError:
                    del left[caller]
            time.sleep(_PAUSE_S)
        return len(left)
    finally:
        for number, caller in enumerate(callers):
            if number % 2:
                caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            caller.close()


def plain(port: int) -> Callable[[], socket.socket]:
    """Opens connections whose kernel keeps little of what is not read."""

    def connect() -> socket.socket:
        caller = socket.socket()
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        caller.settimeout(2)
        try:
            caller.connect(("127.0.0.1", port))
        except BaseException:
            caller.close()
            raise
        caller.setblocking(False)
        return caller

    return connect


def over_tls(port: int, context: ssl.SSLContext) -> Callable[[], socket.socket]:
    opened = plain(port)

    def connect() -> socket.socket:
        caller = opened()
        try:
            caller.settimeout(2)
            wrapped = context.wrap_socket(caller, server_hostname="127.0.0.1")
        except BaseException:
            caller.close()
            raise
        wrapped.setblocking(False)
        return wrapped

    return connect


def asked(target: str, times: int = 1) -> bytes:
    return f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode() * times


def posted(body: bytes, declared: int | None = None, *, more: str = "") -> bytes:
    """A review of this body, and `more` lines of its head; with `declared`, whose length is said to be that."""
    size = len(body) if declared is None else declared
    return f"POST /mutate HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n{more}\r\n".encode() + body


WIDE = json.dumps(
    {"kind": "AdmissionReview", "request": {"object": {"status": {"conditions": [{}] * 150_000}}}}
).encode()
"""Half a MiB that would take 40 MiB as objects."""

COMPRESSED = posted(gzip.compress(bytes(200 * MIB)), more="Content-Encoding: gzip\r\n")
"""200 KiB that are 200 MiB."""
ON_WEBHOOK = {
    "connections that wait": Flood(60),
    "connections that end": Flood(100, seconds=0),
    "bodies without an end": Flood(60, posted(b" " * (MIB - 1), MIB), 2),
    "large bodies": Flood(4, posted(b"[" * (4 * MIB)), 2),
    "deep bodies": Flood(20, posted(b"[" * MIB), 2),
    "wide bodies": Flood(20, posted(WIDE), 2),
    "compressed bodies": Flood(48, COMPRESSED, 2),
    "heads without an end": Flood(20, b"POST /mutate HTTP/1.1\r\n" + b"X: " + b"x" * MIB, 1),
    "answers that are not read": Flood(60, asked("/metrics", 2000), 2),
}
ON_MONITOR = {
    "connections that wait": Flood(200),
    "connections that end": Flood(400, seconds=0),
    "answers that are not read": Flood(300, asked("/metrics", 500), 8),
    "one sandbox's answers that are not read": Flood(200, asked("/metrics?sandbox=large", 100), 3),
    "a silent sandbox": Flood(100, asked("/metrics?sandbox=silent", 100), 3),
    "sandboxes that do not exist": Flood(60, asked("/metrics?sandbox=none", 2000), 1),
    "heads without an end": Flood(60, b"GET / HTTP/1.1\r\nX: " + b"x" * MIB, 1),
}

LARGE = "".join(f'kata_guest_tasks{{item="i{number:060}"}} 1\n' for number in range(9_900)).encode()
"""What a guest may make its shim answer: 10,000 series, 1 MiB."""


class _Shim(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        answer = LARGE if self.path == "/metrics" else b'{"name": "", "uid": "", "namespace": ""}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None: ...


@contextmanager
def shims(directory: Path, large: int) -> Iterator[None]:
    """In a directory of metrics, `large` shims with large answers, the first one's named `large`."""
    with ExitStack() as end:
        for number in range(large):
            server = end.enter_context(ThreadingUnixStreamServer(str(directory / f"large{number or ''}"), _Shim))
            server.daemon_threads = True
            thread = Thread(target=server.serve_forever, daemon=True)
            thread.start()
            end.callback(server.shutdown)
        yield


@contextmanager
def silent_shim(directory: Path) -> Iterator[None]:
    """One that never answers, `silent`."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory / "silent"))
        listener.listen(1000)
        yield


@contextmanager
def ended(words: Sequence[str]) -> Iterator[int]:
    """The pid of a program that runs during the block."""
    with subprocess.Popen(words) as process:
        try:
            yield process.pid
        finally:
            process.kill()


def peak_bytes(pid: int) -> int:
    """The most memory that the process ever had."""
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) << 10
