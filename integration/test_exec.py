"""`ctr task exec`: a process added to a running container, its exit code or the signal that ended it."""

from __future__ import annotations

import signal

import pytest

from .framework.ctr import Ctr

_CODES = (0, 1, 2, 3, 7, 10, 13, 42, 63, 64, 77, 99, 100, 125, 126, 127, 128, 200, 254, 255)
_SIGNALS = ("HUP", "INT", "ABRT", "KILL", "USR1", "SEGV", "PIPE", "ALRM", "TERM")


@pytest.mark.parametrize("code", _CODES)
def test_exec_returns_the_exit_code_of_its_process(ctr: Ctr, shared: str, code: int) -> None:
    assert ctr.inside(shared, "sh", "-c", f"exit {code}", check=False).code == code


@pytest.mark.parametrize("name", _SIGNALS)
def test_exec_killed_by_a_signal_returns_128_plus_its_number(ctr: Ctr, shared: str, name: str) -> None:
    result = ctr.inside(shared, "sh", "-c", f"kill -{name} $$; sleep 60", check=False)

    assert result.code == 128 + signal.Signals[f"SIG{name}"]


def test_exec_returns_output_and_error_apart(ctr: Ctr, shared: str) -> None:
    result = ctr.inside(shared, "sh", "-c", "test -t 1 || echo to out; echo to err >&2")

    assert (result.code, result.out, result.err) == (0, "to out\n", "to err\n")


def test_exec_sees_the_processes_and_files_of_its_container(ctr: Ctr, shared: str) -> None:
    result = ctr.inside(shared, "sh", "-c", "cat /layer-marker; cat /proc/1/cmdline | tr '\\0' ' '")

    assert result.out == "upper\nsleep 100000 "


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
