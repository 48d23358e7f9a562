"""Exit codes and deaths by signal of added processes, which share one VM."""

from __future__ import annotations

import signal

import pytest

from .framework.ctr import Ctr

_CODES = (0, 1, 2, 3, 7, 10, 13, 42, 63, 64, 77, 99, 100, 125, 126, 127, 128, 200, 254, 255)
_SIGNALS = ("HUP", "INT", "ABRT", "KILL", "USR1", "SEGV", "PIPE", "ALRM", "TERM")


@pytest.mark.parametrize("code", _CODES)
def test_exec_returns_the_exit_code_of_its_process(ctr: Ctr, shared: str, code: int) -> None:
    result = ctr("task", "exec", "--exec-id", f"code{code}", shared, "sh", "-c", f"exit {code}", check=False)

    assert result.code == code


@pytest.mark.parametrize("name", _SIGNALS)
def test_exec_killed_by_a_signal_returns_128_plus_its_number(ctr: Ctr, shared: str, name: str) -> None:
    result = ctr(
        "task", "exec", "--exec-id", f"sig{name}", shared, "sh", "-c", f"kill -{name} $$; sleep 60", check=False
    )

    assert result.code == 128 + signal.Signals[f"SIG{name}"]
