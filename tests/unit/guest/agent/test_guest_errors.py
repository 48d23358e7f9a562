"""Errors of the guest agent's."""

from __future__ import annotations

import errno
import re
import subprocess
import sys

import pytest

from guest.agent import errors, log
from guest.agent.errors import AgentError
from pyshim.ttrpc import Code


def test_every_error_has_the_status_of_its_name() -> None:
    """The agent and the shim write the numbers down apart."""
    codes = {re.sub(r"\B(?=[A-Z])", "_", kind.__name__).upper(): kind.code for kind in AgentError.__subclasses__()}

    assert {"NOT_FOUND", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED"} <= set(codes)
    assert codes == {name: getattr(Code, name) for name in codes}
    assert AgentError.code == Code.INTERNAL


def test_the_kernels_error_numbers_are_those_that_the_agent_writes_down() -> None:
    own = {name: number for name, number in vars(errors).items() if name.startswith("E") and name.isupper()}

    assert {"ENOENT", "EINVAL"} <= set(own)
    assert own == {name: getattr(errno, name) for name in own}


@pytest.mark.root
@pytest.mark.parametrize("dropped", ["", "-sys_admin"], ids=["all", "fewer"])
def test_the_capabilities_asked_for_are_those_that_the_kernel_lists(dropped: str) -> None:
    program = (
        "from guest.agent.storage.syscalls import has_capability; print(sum(has_capability(n) << n for n in range(32)))"
    )
    program += "; print(open('/proc/self/status').read().split('CapEff:')[1].split()[0])"
    argv = ["setpriv", f"--bounding-set={dropped}"] if dropped else []

    found = subprocess.run([*argv, sys.executable, "-c", program], capture_output=True, text=True, check=True)

    asked, listed = found.stdout.split()
    assert int(asked) == int(listed, 16) & 0xFFFF_FFFF
    if dropped:
        assert not int(asked) >> 21 & 1


def test_a_log_line_says_the_time_in_seconds_and_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    monkeypatch.setattr(log.os, "write", lambda _fd, data: written.append(data))
    monkeypatch.setattr(log.time, "time_ns", lambda: 1_700_000_000_042_999_999)

    log.warning("x")

    assert written == [b"agent time=1700000000.042 level=warning msg=x\n"]
