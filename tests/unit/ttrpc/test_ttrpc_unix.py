"""Connecting where the listener is slow, full or not there."""

import asyncio
import socket
from pathlib import Path

import pytest

from pyshim.ttrpc import connected_unix_socket
from tests.fakes.open_files import same_open_files
from tests.fakes.unix_sockets import crowded

SOON_S = 0.2


def test_a_full_listener_is_waited_for_and_nothing_is_left_of_a_wait_that_is_given_up(tmp_path: Path) -> None:
    async def body() -> None:
        with same_open_files(), pytest.raises(TimeoutError):
            async with asyncio.timeout(SOON_S):
                await connected_unix_socket(path)

    path = str(tmp_path / "s")
    with crowded(path):
        asyncio.run(body())


async def test_it_is_connected_as_soon_as_the_listener_has_room(tmp_path: Path) -> None:
    path = str(tmp_path / "s")

    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind(path)
        listener.listen(0)
        first.connect(path)
        connecting = asyncio.ensure_future(connected_unix_socket(path))
        await asyncio.sleep(SOON_S)
        assert not connecting.done()

        listener.accept()[0].close()
        with await connecting as sock, listener.accept()[0] as theirs:
            sock.send(b"x")
            assert theirs.recv(1) == b"x"


@pytest.mark.parametrize(
    ("name", "error"), [("nobody", FileNotFoundError), ("x" * 200, OSError)], ids=["missing", "too long"]
)
def test_what_cannot_be_connected_is_an_error(tmp_path: Path, name: str, error: type[Exception]) -> None:
    with same_open_files(), pytest.raises(error):
        asyncio.run(connected_unix_socket(str(tmp_path / name)))
