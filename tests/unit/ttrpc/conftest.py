"""The loop of the tests of this folder."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def no_complaint(fast_clock: None, runner: asyncio.Runner) -> Iterator[None]:
    """Both ends live in the loop, so its clock only skips idle time; an exception that reaches only it is a failure."""
    complaints: list[dict[str, Any]] = []
    runner.get_loop().set_exception_handler(lambda _loop, context: complaints.append(context))
    yield
    assert complaints == []
