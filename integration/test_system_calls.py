"""A small part of `make peers WHAT=faults`: system calls of `start`, of a shim and of `delete` that fail."""

from __future__ import annotations

import pytest

from .framework import system_calls

CALLS = ["mount", "clone", "rename", "setns", "unlinkat"]


@pytest.mark.skipif(bool(system_calls.missing()), reason=system_calls.missing())
@pytest.mark.timeout(900)
def test_system_calls_that_fail_end_in_declared_errors_and_leave_nothing() -> None:
    found = list(system_calls.met([call for call in CALLS if system_calls.known(call)], ("1",)))

    assert not [str(one) for one in found if one.problem]
    assert sum(bool(one.times) for one in found) >= len(CALLS)
