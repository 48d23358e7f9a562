"""The monitor socket, asked as CSI drivers ask it, and by clients that know no HTTP."""

import asyncio
import contextlib
import json
import os
import stat
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from pyshim.model.errors import NotFound
from pyshim.model.volumes import VolumeStats, VolumeUsage
from pyshim.operator.direct_volume import add, ask
from pyshim.task.monitor_socket import MonitorSocket


class Volumes:
    def __init__(self) -> None:
        self.resized: list[tuple[str, int]] = []

    async def stats(self, volume_path: str) -> VolumeStats:
        if volume_path != "/var/lib/a b?c":
            raise NotFound(f"find direct volume '{volume_path}'")
        usage = VolumeUsage(total=100, available=100, used=0, unit=1)
        return VolumeStats(usages=(usage,), abnormal=False, message="OK")

    async def resize(self, volume_path: str, size_bytes: int) -> None:
        self.resized.append((volume_path, size_bytes))


def served(directory: Path, scenario: Callable[[str, Volumes], Coroutine[Any, Any, None]]) -> None:
    async def body() -> None:
        volumes, path = Volumes(), str(directory / "shim-monitor.sock")
        monitor = MonitorSocket(path, volumes)
        await monitor.open()
        try:
            async with asyncio.timeout(60):
                await scenario(path, volumes)
        finally:
            await monitor.close()

    asyncio.run(body())


async def said(path: str, request: bytes) -> tuple[int, bytes]:
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(request)
    reply = await reader.read()
    writer.close()
    head, _, body = reply.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


def test_statistics_are_the_agents_words(tmp_path: Path) -> None:
    async def scenario(path: str, volumes: Volumes) -> None:
        request = b"GET /direct-volume/stats?path=%2Fvar%2Flib%2Fa%20b%3Fc HTTP/1.1\r\nHost: shim\r\n\r\n"

        status, body = await said(path, request)

        assert status == 200
        assert json.loads(body) == {
            "usage": [{"available": 100, "total": 100, "unit": 1}],
            "volume_condition": {"message": "OK"},
        }
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600

    served(tmp_path, scenario)


def test_a_resize_is_passed_on(tmp_path: Path) -> None:
    async def scenario(path: str, volumes: Volumes) -> None:
        body = b'{"VolumePath": "/v", "Size": 4096}'
        head = b"POST /direct-volume/resize HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body)

        assert await said(path, head + body) == (200, b"")
        assert volumes.resized == [("/v", 4096)]

    served(tmp_path, scenario)


_POST = b"POST /direct-volume/resize HTTP/1.1\r\nContent-Length: "


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /direct-volume/stats?path=/none HTTP/1.1\r\n\r\n", 404),
        (b"GET /direct-volume/stats HTTP/1.1\r\n\r\n", 400),
        (b"POST /direct-volume/stats?path=/v HTTP/1.1\r\n\r\n", 405),
        (b"GET /direct-volume/resize HTTP/1.1\r\n\r\n", 405),
        (b"GET /metrics HTTP/1.1\r\n\r\n", 404),
        (b"hello\r\n\r\n", 400),
        (_POST + b"2\r\n\r\n{}", 400),
        (_POST + b"2\r\n\r\n[]", 400),
        (_POST + b"32\r\n\r\n" + b'{"VolumePath": 7, "Size": "big"}', 400),
        (_POST + b"-1\r\n\r\n", 400),
        (_POST + b"999999999\r\n\r\n", 400),
        (b"POST /direct-volume/resize HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n", 400),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_answered_has_a_status(tmp_path: Path, request_bytes: bytes, status: int) -> None:
    async def scenario(path: str, volumes: Volumes) -> None:
        assert (await said(path, request_bytes))[0] == status
        assert volumes.resized == []

    served(tmp_path, scenario)


def test_a_client_that_leaves_early_disturbs_nobody(tmp_path: Path) -> None:
    async def scenario(path: str, volumes: Volumes) -> None:
        _, writer = await asyncio.open_unix_connection(path)
        writer.write(b"GET /")
        writer.close()
        assert (await said(path, b"GET /x HTTP/1.1\r\n\r\n"))[0] == 404

    served(tmp_path, scenario)


def test_there_is_no_moment_in_which_others_could_connect(tmp_path: Path) -> None:
    seen: set[int] = set()
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            with contextlib.suppress(FileNotFoundError):
                seen.add(stat.S_IMODE(os.stat(tmp_path / "shim-monitor.sock").st_mode))

    async def nothing(path: str, volumes: Volumes) -> None:
        await asyncio.sleep(0)

    watcher = threading.Thread(target=watch)
    before = os.umask(0)
    watcher.start()
    try:
        for _ in range(50):
            served(tmp_path, nothing)
            os.unlink(tmp_path / "shim-monitor.sock")
    finally:
        os.umask(before)
        over.set()
        watcher.join()

    assert seen == {0o600}


def test_the_operators_command_asks_the_same_way(tmp_path: Path) -> None:
    records, states = tmp_path / "records", tmp_path / "sbs"
    (states / "s1").mkdir(parents=True)
    volume = "/var/lib/a b?c"
    add(volume, '{"volume-type": "block", "device": "/dev/x", "fstype": "ext4"}', records=str(records))
    (next(records.iterdir()) / "s1").touch()

    async def scenario(path: str, volumes: Volumes) -> None:
        target = "/direct-volume/stats?path=%2Fvar%2Flib%2Fa%20b%3Fc"
        answer = await asyncio.to_thread(ask, volume, "GET", target, "", records=str(records), state_dir=str(states))
        assert json.loads(answer)["volume_condition"] == {"message": "OK"}

    served(states / "s1", scenario)
