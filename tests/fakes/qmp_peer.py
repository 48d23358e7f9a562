"""A scripted QMP server: says what a test tells it to, as bytes, and remembers what it was sent."""

import asyncio
import json
import socket
from collections.abc import Callable, Mapping
from typing import Any

GREETING = {"QMP": {"version": {"qemu": {"major": 7, "minor": 2, "micro": 0}, "package": ""}, "capabilities": ["oob"]}}

Answer = Callable[["QmpPeer", dict[str, Any]], None]


def agree(peer: "QmpPeer", request: dict[str, Any]) -> None:
    """Answers every command with an empty object."""
    peer.reply(request, {})


class QmpPeer:
    """One connection's far end. `answers` maps commands to what to do, else `agree`.

    `client` is the near end, unless the far one is given as `ours`.
    """

    def __init__(
        self,
        answers: Mapping[str, Answer] | None = None,
        *,
        greeting: bytes | None = None,
        ours: socket.socket | None = None,
    ) -> None:
        if ours is None:
            self.client, self._ours = socket.socketpair()
        else:
            self._ours = ours
        self._ours.setblocking(False)
        self._answers = answers or {}
        self._greeting = json.dumps(GREETING).encode() + b"\r\n" if greeting is None else greeting
        self.requests: list[dict[str, Any]] = []
        self._task = asyncio.get_running_loop().create_task(self._serve(), name="qmp peer")

    async def _serve(self) -> None:
        reader, self._writer = await asyncio.open_connection(sock=self._ours)
        self._writer.write(self._greeting)
        text = ""
        while data := await reader.read(65536):
            text = (text + data.decode()).lstrip()  # objects come one after the other, with nothing between
            while text.startswith("{"):
                try:
                    request, end = json.JSONDecoder().raw_decode(text)
                except ValueError:
                    break
                text = text[end:].lstrip()
                self.requests.append(request)
                self._answers.get(request["execute"], agree)(self, request)

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    def reply(self, request: dict[str, Any], value: object) -> None:
        self.send(json.dumps({"return": value, "id": request.get("id")}).encode() + b"\r\n")

    def refuse(self, request: dict[str, Any], error_class: str, text: str) -> None:
        error = {"class": error_class, "desc": text}
        self.send(json.dumps({"error": error, "id": request.get("id")}).encode() + b"\r\n")

    def event(self, name: str, data: dict[str, Any]) -> None:
        stamp = {"seconds": 1, "microseconds": 2}
        self.send(json.dumps({"event": name, "data": data, "timestamp": stamp}).encode() + b"\r\n")

    def hang_up(self) -> None:
        self._writer.close()

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if hasattr(self, "_writer"):
            self._writer.close()
        else:
            self._ours.close()
