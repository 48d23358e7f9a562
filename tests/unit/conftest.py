"""Configurations, host facts and specs as plain values; a FIFO, links, a process to end, mounts of a forked child."""

import asyncio
import inspect
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pyshim.host import syscalls
from pyshim.host.processes.children import Children
from tests.fakes.namespaces import Namespace
from tests.fakes.wire import Wire
from tests.unit.pod.conftest import Stack

CLONE_NEWNS = 0x00020000


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    path = tmp_path / "fifo"
    os.mkfifo(path, 0o700)
    return path


@pytest.fixture
def sleeper(tmp_path: Path) -> "Iterator[subprocess.Popen[bytes]]":
    """A process with the test's directory in its command line."""
    program = "import time; print(flush=True); time.sleep(600)"
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", program, str(tmp_path / "key")], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()  # Popen may return before the kernel shows the new command line
    yield process
    process.kill()
    process.communicate()


@pytest.fixture
def wire() -> Iterator[Wire]:
    pod, outside = Namespace(), Namespace()
    try:
        yield Wire(pod, outside)
    finally:
        pod.close()
        outside.close()


@pytest.fixture
def private_mounts() -> None:
    """The test runs in a child, in a mount namespace of its own."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if "private_mounts" not in pyfuncitem.fixturenames:
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    in_private_mounts(lambda: pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


def in_private_mounts(body: Callable[[], None]) -> None:
    """A child has run `body` in a mount namespace of its own; its failure is the test's."""
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        report = b""
        try:
            signal.alarm(60)
            syscalls.unshare(CLONE_NEWNS)
            syscalls.mount("", "/", "", syscalls.MS_REC | syscalls.MS_PRIVATE)
            body()
        except BaseException:
            report = traceback.format_exc().encode()
        os.write(write_fd, report[-60000:])
        os._exit(1 if report else 0)
    os.close(write_fd)
    with open(read_fd, "rb") as pipe:
        report = pipe.read()
    _, status = os.waitpid(pid, 0)
    if status != 0:
        pytest.fail(report.decode() or f"the child ended with wait status {status}", pytrace=False)


@pytest.fixture
def stack_kind() -> type[Stack]:
    return Stack


@pytest.fixture
def stack(fast_clock: None, runner: asyncio.Runner, stack_kind: type[Stack]) -> Iterator[Stack]:
    """A pod on fakes; after the test its host is clean."""

    async def made() -> Stack:
        return stack_kind()

    stack = runner.run(made())
    yield stack
    runner.run(stack.close())
    assert stack.left() == {}


@pytest.fixture
def children(nothing_left: None) -> Iterator[Children]:
    """After the test every child is reaped."""
    children = Children()
    yield children
    assert children.alive == ()
    with pytest.raises(ChildProcessError):
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG)
