"""What holds for every test."""

import asyncio
import faulthandler
import inspect
import logging
import os
import signal
from collections.abc import Generator, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.fakes.clock import FastForwardLoop
from tests.fakes.open_files import same_open_files

# A busy machine is no failure: an example may take as long as it takes, and so may its making.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=120)
# For `make check`, which says so by --hypothesis-profile.
settings.register_profile("quick", settings.get_profile("patient"), max_examples=30)
settings.load_profile("patient")
# Nor is a step of a loop that a busy machine stretches; in development mode asyncio warns of each, on stderr.
logging.getLogger("asyncio").addFilter(lambda record: not record.msg.startswith("Executing "))


def pytest_configure() -> None:
    """Whoever ends a run that hangs reads where it did: SIGTERM prints every stack, here and in each worker."""
    faulthandler.register(signal.SIGTERM, file=os.dup(2), chain=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.geteuid() == 0:
        return
    for item in items:
        if item.get_closest_marker("root"):
            item.add_marker(pytest.mark.skip(reason="needs root"))


_LIMIT_S = 86_400.0
"""Of a test that is a coroutine function, by the clock of its loop: a wait in vain ends with the lines that wait."""


@pytest.fixture
def fast_clock() -> None:
    """The test's loop jumps over idle time; see `tests.fakes.clock`."""


@pytest.fixture
def real_clock() -> None:
    """The test's loop does wait, though its module has `fast_clock`: a peer is another process."""


@pytest.fixture
def runner(request: pytest.FixtureRequest) -> Iterator[asyncio.Runner]:
    """The loop of a test that is a coroutine function; its fixtures may use it before and after."""
    is_fast = "fast_clock" in request.fixturenames and "real_clock" not in request.fixturenames
    runner = asyncio.Runner(loop_factory=FastForwardLoop, debug=False) if is_fast else asyncio.Runner(debug=True)
    with runner:
        yield runner
        runner.run(_no_transport_left(runner.get_loop()))


async def _no_transport_left(loop: asyncio.AbstractEventLoop) -> None:
    """A socket that a test left open would be another test's failure: that in which the garbage collector finds it.

    One that was closed by TLS is so some turns of the loop later.
    """
    transports = loop._transports  # type: ignore[attr-defined]
    for _ in range(500):
        left = [transport for transport in transports.values() if transport._sock is not None]
        if not left:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"the test left open: {left}")


@pytest.fixture
def no_task_left(runner: asyncio.Runner) -> Iterator[None]:
    yield
    runner.run(asyncio.sleep(0))
    assert asyncio.all_tasks(runner.get_loop()) == set()


@pytest.fixture
def nothing_left(no_task_left: None) -> Iterator[None]:
    """After the test no task of it runs, and the same files are open as before."""
    with same_open_files():
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that is a coroutine function; pytest itself only calls plain functions."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    test = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
    pyfuncitem._request.getfixturevalue("runner").run(asyncio.wait_for(test, _LIMIT_S))
    return True


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """A worker can send the report of a test that logs or shows what is no UTF-8: lone surrogates are escaped."""
    return _sendable((yield))


def _sendable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {key: _sendable(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_sendable, value))
    return value
