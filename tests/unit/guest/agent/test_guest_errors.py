"""Errors of the guest agent's."""

from __future__ import annotations

import logging
import re
import subprocess
import sys

import pytest

from guest.agent import log
from guest.agent.errors import AgentError
from pyshim.ttrpc import Code


def test_every_error_has_the_status_of_its_name() -> None:
    codes = {re.sub(r"\B(?=[A-Z])", "_", kind.__name__).upper(): kind.code for kind in AgentError.__subclasses__()}

    assert {"NOT_FOUND", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED"} <= set(codes)
    assert codes == {name: getattr(Code, name) for name in codes}
    assert AgentError.code == Code.INTERNAL


@pytest.mark.root
@pytest.mark.parametrize("dropped", ["", "-sys_admin"], ids=["all", "fewer"])
def test_the_capabilities_asked_for_are_those_that_the_kernel_lists(dropped: str) -> None:
    program = "from guest.agent.syscalls import has_capability; print(sum(has_capability(n) << n for n in range(32)))"
    program += "; print(open('/proc/self/status').read().split('CapEff:')[1].split()[0])"
    argv = ["setpriv", f"--bounding-set={dropped}"] if dropped else []

    found = subprocess.run([*argv, sys.executable, "-c", program], capture_output=True, text=True, check=True)

    asked, listed = found.stdout.split()
    assert int(asked) == int(listed, 16) & 0xFFFF_FFFF
    if dropped:
        assert not int(asked) >> 21 & 1


def log_line(message: str, **fields: object) -> str:
    record = logging.makeLogRecord({"msg": message, "levelname": "WARNING", "created": 1_700_000_000.0421, **fields})
    return log.LineFormatter().format(record)


def test_a_log_line_says_the_time_in_seconds_and_milliseconds() -> None:
    assert log_line("x") == "agent time=1700000000.042 level=warning msg=x"


def test_a_log_line_is_one_line_whatever_its_values_hold() -> None:
    line = log_line("a b", path='/x="1"\n', error=ValueError("ü b"), count=3, empty="")

    fields = r'msg="a b" path="/x=\"1\"\n" error="\xfc b" count=3 empty=""'
    assert line == f"agent time=1700000000.042 level=warning {fields}"
