"""The daemon's side: starts a child for one question and reads its answer."""

import asyncio
import json
import os
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec

from pyshim.host.processes.children import Child, Children
from pyshim.model import errors
from pyshim.model.devices import DeviceQuestion, PodDevices
from pyshim.model.errors import DeadlineExceeded, Internal, ShimError

TIMEOUT_S = 25.0
"""For start, the kubelet's answer (which has a shorter limit of its own) and the specs."""
MAX_ANSWER_BYTES = 32 * 1024 * 1024
_SOCKET_FD = 3
# `-S` keeps site-packages out of the child, so the shim passes its own import paths on.
_PROGRAM = (
    "import sys; sys.path += [path for path in sys.argv[1:] if path not in sys.path]; "
    "from pyshim.resources.devices.host.child import main; main()"
)
_ENV = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "GRPC_ENABLE_FORK_SUPPORT": "0"}
_EXIT_TIMEOUT_S = 1.0


class DeviceFinder:
    def __init__(self, children: Children, *, timeout_s: float = TIMEOUT_S) -> None:
        self._children = children
        self._timeout_s = timeout_s

    async def find(self, question: DeviceQuestion) -> PodDevices:
        """The answer; nothing is started for an empty question. Raises the child's ShimError, or DeadlineExceeded."""
        if question.is_empty:
            return PodDevices()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with ours:
            with theirs:
                # Not in the ledger: it ends by itself when the shim has closed the socket.
                child = await self._children.spawn(
                    (sys.executable, "-I", "-S", "-c", _PROGRAM, *_import_paths()),
                    env=_ENV,
                    fds={_SOCKET_FD: theirs.fileno()},
                )
            try:
                async with asyncio.timeout(self._timeout_s):
                    return _answer(await self._ask(ours, child, question))
            except TimeoutError:
                raise DeadlineExceeded(f"find devices: no answer within {self._timeout_s:g} s") from None
            finally:
                await child.end()

    async def _ask(self, ours: socket.socket, child: Child, question: DeviceQuestion) -> Mapping[str, Any]:
        loop = asyncio.get_running_loop()
        with suppress(BrokenPipeError, ConnectionResetError):  # the end of the stream says more
            await loop.sock_sendall(ours, json.dumps(msgspec.to_builtins(question)).encode() + b"\n")
        answer = bytearray()
        while chunk := await _received(ours):
            answer += chunk
            if len(answer) > MAX_ANSWER_BYTES:
                raise Internal(f"find devices: an answer of more than {MAX_ANSWER_BYTES} bytes")
        try:
            document = json.loads(bytes(answer))
        except ValueError:
            with suppress(TimeoutError):
                async with asyncio.timeout(_EXIT_TIMEOUT_S):
                    await child.wait()
            raise Internal(f"find devices: {child.describe_exit()}") from None
        assert isinstance(document, dict), "the child writes an object"
        return document


def _import_paths() -> list[str]:
    return [os.path.abspath(path) for path in sys.path]


async def _received(ours: socket.socket) -> bytes:
    try:
        return await asyncio.get_running_loop().sock_recv(ours, 1 << 16)
    except ConnectionResetError:
        return b""


def _answer(document: Mapping[str, Any]) -> PodDevices:
    if "ok" in document:
        return msgspec.convert(document["ok"], PodDevices)
    kind = getattr(errors, str(document.get("kind")), Internal)
    text = str(document.get("error"))
    raise (kind if isinstance(kind, type) and issubclass(kind, ShimError) else Internal)(text)
