"""`pyshim webhook serve`: its options, and a server until its end."""

import asyncio
import datetime
import json
import os
import signal
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from pyshim.node.cli.command import run
from tests.fakes.self_signed import self_signed
from tests.unit.node.webhook.reviews import pod, review

PROJECT = Path(__file__).parents[4]
CLASS = f"pykata={PROJECT}/configs/configuration-qemu.toml"
GENEROUS_S = 60.0
REQUESTS = {"requests": {"cpu": "3", "memory": "4Gi"}}


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--class", CLASS], "is not NAME=FILE with a name of its own"),
        (["--class", "other"], "is not NAME=FILE"),
        (["--listen", "here"], "is not HOST:PORT"),
    ],
)
def test_wrong_use_is_named(words: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["webhook", "serve", "--certificate", "c", "--key", "k", "--class", CLASS, *words]) == 2
    assert problem in " ".join(capsys.readouterr().err.split())


def test_a_configuration_that_starts_no_pod_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.toml").write_text("[hypervisor.qemu]\ndefault_memory = 'lots'\n")

    assert run(["webhook", "serve", "--certificate", "c", "--key", "k", "--class", f"a={tmp_path}/c.toml"]) == 1
    assert "default_memory" in capsys.readouterr().err


def test_the_command_serves_until_it_is_asked_to_end(runner: asyncio.Runner, tmp_path: Path) -> None:
    pair = self_signed(("127.0.0.1",), days=1, now=datetime.datetime.now(datetime.UTC))
    (tmp_path / "tls.crt").write_bytes(pair.certificate)
    (tmp_path / "tls.key").write_bytes(pair.key)
    words = ["--class", CLASS, "--listen", "127.0.0.1:0", "--certificate", f"{tmp_path}/tls.crt"]
    command = [sys.executable, "-m", "pyshim", "webhook", "serve", *words, "--key", f"{tmp_path}/tls.key"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, cwd=PROJECT, env=dict(os.environ), text=True) as server:
        try:
            assert server.stderr is not None
            line = server.stderr.readline()
            assert "webhook serves" in line, line
            port = line.split("port=")[1].split()[0]
            answer = runner.run(asked(f"https://127.0.0.1:{port}/mutate", pair.authority))
        finally:
            server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=GENEROUS_S) == 0

    assert answer["response"]["patchType"] == "JSONPatch"


async def asked(url: str, authority: bytes) -> dict[str, Any]:
    connector = aiohttp.TCPConnector(ssl=ssl.create_default_context(cadata=authority.decode()))
    async with asyncio.timeout(GENEROUS_S), aiohttp.ClientSession(connector=connector) as session:
        data = json.dumps(review(pod(REQUESTS))).encode()
        async with session.post(url, data=data) as response:
            found: dict[str, Any] = await response.json()
            return found
