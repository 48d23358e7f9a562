"""The debug console's shell, in a process of its own that may reap everything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[4]
_PROGRAM = """
import asyncio, socket
from guest.agent.children import Children
from guest.agent.console import serve_shell

class Watched(Children):
    shell = None

    def spawn(self, *args, **options):
        self.shell = super().spawn(*args, **options)
        return self.shell

async def main():
    children = Watched()
    children.start()
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the least there is: the rest waits in the terminal
    served = asyncio.create_task(serve_shell(children, theirs))
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(ours, COMMAND)
    if WAITS:
        while children.shell is None or children.shell.is_running:
            await asyncio.sleep(0.01)
    said = b""
    while data := await loop.sock_recv(ours, 65536):
        said += data
    await served
    ours.close()
    print(said.count(b"Q"))

asyncio.run(main())
"""


def said(command: str, *, waits: bool) -> int:
    """The number of letters Q that a shell printed for this line; with `waits` no read comes before its end."""
    program = _PROGRAM.replace("COMMAND", repr(command.encode())).replace("WAITS", repr(waits))
    argv = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=100, cwd=REPOSITORY)
    assert (done.returncode, done.stderr) == (0, "")
    return int(done.stdout)


@pytest.mark.parametrize(("length", "waits"), [(9000, True), (300000, False)], ids=["read late", "much"])
def test_what_a_shell_said_last_arrives_although_it_has_ended(length: int, waits: bool) -> None:
    assert said(f"head -c {length} /dev/zero | tr '\\0' '\\121'; exit\n", waits=waits) == length
