"""`pyshim nri run` as a process: started by a runtime over a descriptor, refused, wrongly called, ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pyshim.node.cli.command import run
from tests.fakes.nri_runtime import FakeRuntime

_MAIN = "import sys; from pyshim.node.cli.command import run; sys.exit(run(['nri', 'run', *sys.argv[1:]]))"
_NAMED = {"NRI_PLUGIN_NAME": "placer", "NRI_PLUGIN_IDX": "42"}


def _words(*options: str) -> list[str]:
    return [sys.executable, "-c", _MAIN, *options]


@contextlib.contextmanager
def _started_by_runtime(*options: str) -> Iterator[tuple[subprocess.Popen[str], socket.socket]]:
    """The plugin, and the runtime's end of the connection that it was given."""
    ours, theirs = socket.socketpair()
    environment = {**os.environ, **_NAMED, "NRI_PLUGIN_SOCKET": str(theirs.fileno())}
    process = subprocess.Popen(
        _words("--placement-socket", "", *options),
        env=environment,
        pass_fds=(theirs.fileno(),),
        stderr=subprocess.PIPE,
        text=True,
    )
    theirs.close()
    with process, ours:
        try:
            yield process, ours
        finally:
            process.kill()


def test_a_plugin_that_the_runtime_started_has_its_name_from_it_and_ends_with_the_connection() -> None:
    async def serve(sock: socket.socket) -> tuple[str, str]:
        async with FakeRuntime(sock) as runtime:
            await runtime.accept()
            request = runtime.registered.result()
            return request.plugin_name, request.plugin_idx

    with _started_by_runtime() as (process, sock):
        assert asyncio.run(serve(sock)) == ("placer", "42")
        assert process.wait() == 0


def test_a_refused_registration_is_one_line() -> None:
    async def refuse(sock: socket.socket, process: subprocess.Popen[str]) -> int:
        async with FakeRuntime(sock, refuses="no plugins today"):
            return await asyncio.to_thread(process.wait)

    with _started_by_runtime() as (process, sock):
        assert asyncio.run(refuse(sock, process)) == 1
        assert process.stderr is not None
        said = process.stderr.read()

    assert said == "pyshim: register plugin '42-placer': the runtime refuses it: no plugins today\n"


@pytest.mark.parametrize(
    ("options", "environment", "problem"),
    [
        ((), {"NRI_PLUGIN_SOCKET": "three"}, "use NRI_PLUGIN_SOCKET='three': not a descriptor"),
        ((), {"NRI_PLUGIN_SOCKET": "999"}, "use NRI_PLUGIN_SOCKET='999': "),
        (("--index", "5"), {}, "index plugin '5': not two digits"),
        (("--name", "a b"), {}, "name plugin 'a b': only letters"),
        (("--reserved", "8000"), {}, "reserve CPUs 8000: not online"),
        (("--placement-socket", "/proc/nowhere/nri.sock"), {}, "/proc/nowhere"),
        (("--placement-socket", f"/{'x' * 200}"), {}, "the limit of a unix socket"),
    ],
    ids=["no number", "no descriptor", "index", "name", "reserved", "no directory", "long path"],
)
def test_what_cannot_be_is_one_line(
    options: tuple[str, ...],
    environment: dict[str, str],
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, text in environment.items():
        monkeypatch.setenv(name, text)

    assert run(["nri", "run", "--placement-socket", "", *options]) == 1

    error = capsys.readouterr().err
    assert problem in error.splitlines()[-1]
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("gold", "'gold' is neither exclusive=NAME nor shared=NAME"),
        ("best=gold", "'best=gold' is neither exclusive=NAME nor shared=NAME"),
        ("shared=", "'shared=' is neither exclusive=NAME nor shared=NAME"),
        ("shared=../x", "'shared=../x': '../x' is not a directory name"),
    ],
)
def test_a_class_for_no_vm_is_a_wrong_word(text: str, problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["nri", "run", "--rdt-class", text]) == 2
    assert problem in capsys.readouterr().err


def test_sigterm_ends_it_and_takes_its_socket_away(tmp_path: Path) -> None:
    path = tmp_path / "nri.sock"
    words = _words("--placement-socket", str(path), "--socket", str(tmp_path / "no-runtime.sock"))
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            assert "no connection to the runtime" in process.stderr.readline()
            assert path.is_socket()
            process.send_signal(signal.SIGTERM)
            assert process.wait() == 0
        finally:
            process.kill()

    assert not path.exists()


def test_a_plugin_that_ends_leaves_the_socket_of_the_next_one(tmp_path: Path) -> None:
    """A runtime that was restarted starts the next before the one it had has ended."""
    path = tmp_path / "nri.sock"
    words = _words("--placement-socket", str(path), "--socket", str(tmp_path / "no-runtime.sock"))
    with contextlib.ExitStack() as end:
        plugins = []
        for _each in range(2):
            process = end.enter_context(subprocess.Popen(words, stderr=subprocess.PIPE, text=True))
            end.callback(process.kill)
            assert process.stderr is not None
            assert "no connection to the runtime" in process.stderr.readline()
            plugins.append(process)

        plugins[0].send_signal(signal.SIGTERM)
        assert plugins[0].wait() == 0
        assert path.is_socket()
        path.unlink()
        plugins[1].send_signal(signal.SIGTERM)
        assert plugins[1].wait() == 0
