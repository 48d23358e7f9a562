"""`ctr task exec`: a process added to a running container."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from .framework.ctr import Ctr, Result

_ids = itertools.count(1)
Exec = Callable[..., Result]


@pytest.fixture
def execute(ctr: Ctr, shared: str) -> Exec:
    def run(*command: str, options: tuple[str, ...] = (), input: bytes | None = None) -> Result:
        words = ("task", "exec", "--exec-id", f"e{next(_ids)}", *options, shared, *command)
        return ctr(*words, input=input, check=False)

    return run


def test_exec_returns_output_and_error_apart(execute: Exec) -> None:
    result = execute("sh", "-c", "echo to out; echo to err >&2")

    assert (result.code, result.out, result.err) == (0, "to out\n", "to err\n")


def test_exec_sees_the_processes_and_files_of_its_container(execute: Exec) -> None:
    result = execute("sh", "-c", "cat /layer-marker; cat /proc/1/cmdline | tr '\\0' ' '")

    assert result.out == "upper\nsleep 100000 "


def test_exec_runs_in_the_directory_it_was_given(execute: Exec) -> None:
    assert execute("pwd", options=("--cwd", "/var")).out == "/var\n"


def test_exec_runs_as_the_user_it_was_given(execute: Exec) -> None:
    assert execute("id", options=("--user", "1000:1000")).out.split()[:2] == ["uid=1000(alice)", "gid=1000(alice)"]


def test_exec_without_terminal_has_none(execute: Exec) -> None:
    assert execute("sh", "-c", "test -t 1 && echo terminal || echo none").out == "none\n"


def test_terminal_follows_a_resize(ctr: Ctr, shared: str) -> None:
    script = "echo ready; until [ \"$(stty size)\" = '50 132' ]; do sleep 0.1; done; echo resized"
    words = ("task", "exec", "-t", "--exec-id", "resize", shared, "sh", "-c", script)
    with ctr.on_terminal(*words, rows=24, columns=80) as terminal:
        terminal.read_until("ready")
        terminal.resize(50, 132)
        terminal.read_until("resized")

        assert terminal.wait() == 0


def test_control_c_on_the_terminal_interrupts_the_process(ctr: Ctr, shared: str) -> None:
    script = "trap 'echo interrupted; exit 5' INT; echo ready; while :; do sleep 0.1; done"
    with ctr.on_terminal("task", "exec", "-t", "--exec-id", "ctrlc", shared, "sh", "-c", script) as terminal:
        terminal.read_until("ready")
        terminal.type("\x03")
        terminal.read_until("interrupted")

        assert terminal.wait() == 5


def test_terminal_gives_one_stream_with_carriage_returns(ctr: Ctr, shared: str) -> None:
    script = "test -t 0 && test -t 1 && test -t 2 && echo out; echo err >&2; read line; echo got $line"
    with ctr.on_terminal("task", "exec", "-t", "--exec-id", "one", shared, "sh", "-c", script) as terminal:
        terminal.read_until("out\r")
        terminal.read_until("err\r")
        terminal.type("typed\n")
        terminal.read_until("got typed\r")

        assert terminal.wait() == 0


def test_control_d_on_the_terminal_is_end_of_input(ctr: Ctr, shared: str) -> None:
    with ctr.on_terminal(
        "task", "exec", "-t", "--exec-id", "eof", shared, "sh", "-c", "echo ready; cat; echo ended"
    ) as terminal:
        terminal.read_until("ready")
        terminal.type("\x04")
        terminal.read_until("ended")

        assert terminal.wait() == 0
