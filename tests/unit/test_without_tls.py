"""What a shim is without `ssl`: everything but that."""

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

_SETTING = """
import sys
from pyshim.without_tls import leave_out_tls
leave_out_tls()
"""


def run(program: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", _SETTING + program],
        cwd=REPOSITORY,
        check=True,
        timeout=60,
        capture_output=True,
        text=True,
    ).stdout


def test_all_of_a_shim_is_loaded_without_openssl() -> None:
    run("""
import importlib, pyshim.serve
from pyshim.later import LATER
for name in LATER:
    importlib.import_module(name)
found = {"_ssl", "_hashlib"} & sys.modules.keys()
assert not found, found
""")


def test_loops_serve_and_call_without_it() -> None:
    said = run("""
import asyncio, socket

async def main():
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    other_reader, other_writer = await asyncio.open_unix_connection(sock=theirs)
    writer.write(b"said\\n")
    await writer.drain()
    print((await other_reader.readline()).decode())
    for each in (writer, other_writer):
        each.close()
        await each.wait_closed()

asyncio.run(main())
""")

    assert said.split() == ["said"]


def test_who_wants_it_is_told_why_it_is_not_there() -> None:
    said = run("""
import ssl
try:
    ssl.create_default_context()
except AttributeError as error:
    print(error)
""")

    assert said.strip() == "use 'ssl.create_default_context': a shim has no TLS, see pyshim/without_tls.py"
