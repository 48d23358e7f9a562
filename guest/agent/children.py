"""Child processes: spawned with posix_spawn and reaped in one place, orphans included.

The agent is process 1 or a child subreaper: every process of the guest whose parent dies becomes its child. So one
handler of SIGCHLD waits for all children and reports each end to its `Child`. Nothing else in this process may wait:
neither `subprocess` nor asyncio's subprocesses, whose watchers would race with the handler.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import BinaryIO, NamedTuple

from guest.agent.errors import AgentError, DeadlineExceeded, Internal, os_cause

log = logging.getLogger(__name__)

_LOAD_TIMEOUT_S = 30.0
_MAX_OUTPUT_BYTES = 1 << 20
"""Bytes of a program's stdout, and of its stderr, that are read; the rest is dropped."""
_SEARCH = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
ENVIRONMENT = {"PATH": ":".join(_SEARCH)}
PYTHON_ENVIRONMENT = {**ENVIRONMENT, "PYTHONPATH": os.path.realpath(f"{__file__}/../../..")}
"""For programs of this package, with the agent's import path."""


class Finished(NamedTuple):
    """A program's end: `code` is the exit status, or 128 + signal; `stdout` and `stderr` have at most 1 MiB."""

    code: int
    stdout: bytes
    stderr: bytes

    @property
    def complaint(self) -> str:
        """Its stderr, as text without line ends around it."""
        return self.stderr.decode("utf-8", "replace").strip()


def find_program(name: str) -> str | None:
    """The first executable called `name` on the agent's fixed search path."""
    for folder in _SEARCH:
        path = f"{folder}/{name}"
        if os.access(path, os.X_OK):
            return path
    return None


def python_program(module: str, *arguments: str) -> list[str]:
    """The words that run `python3 -m module`; to be started with PYTHON_ENVIRONMENT."""
    return [sys.executable, "-P", "-s", "-m", module, *arguments]


class Child:
    """A child process. Any number of waiters get its exit code, at any time."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.code: int | None = None
        """The exit status (0-255), or 128 + the number of the signal that killed it; None while it runs."""
        self._ended = asyncio.Event()
        self._callbacks: list[Callable[[int], None]] = []

    @property
    def is_running(self) -> bool:
        """True until it is reaped: only until then the pid is its own."""
        return self.code is None

    async def wait(self) -> int:
        """Its exit code, once it has ended."""
        await self._ended.wait()
        assert self.code is not None
        return self.code

    def when_ended(self, callback: Callable[[int], None]) -> None:
        """`callback(code)` runs at the end, before any waiter goes on; at once if the process has ended."""
        if self.code is None:
            self._callbacks.append(callback)
        else:
            callback(self.code)

    def send_signal(self, number: int) -> None:
        """The signal is sent unless the process has ended. Raises OSError."""
        if self.is_running:
            os.kill(self.pid, number)

    def end(self, code: int) -> None:
        """The process was reaped. Only `Children` calls this."""
        self.code = code
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(code)
        self._ended.set()


class Children:
    """Owner of SIGCHLD. One per process."""

    def __init__(self) -> None:
        self._running: dict[int, Child] = {}
        self._unclaimed: dict[int, int] = {}
        self._expecting = 0

    def start(self) -> None:
        """Children that end are reaped by the running loop from now on."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._reap)
        self._reap()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            code = code if code >= 0 else 128 - code
            child = self._running.pop(pid, None)
            if child is not None:
                child.end(code)
            elif self._expecting:
                self._unclaimed[pid] = code

    def spawn(
        self,
        argv: list[str],
        *,
        stdin: int = -1,
        stdout: int = -1,
        stderr: int = -1,
        outlives_readers: bool = False,
        environment: Mapping[str, str] = ENVIRONMENT,
    ) -> Child:
        """The program runs with the given fds (-1: /dev/null) and no others. `argv[0]` is an absolute path.

        With `outlives_readers` a write without a reader fails and does not end the program (SIGPIPE).
        """
        actions: list[tuple[int, ...] | tuple[int, int, str, int, int]] = [
            (os.POSIX_SPAWN_OPEN, number, "/dev/null", os.O_RDWR, 0) if fd < 0 else (os.POSIX_SPAWN_DUP2, fd, number)
            for number, fd in enumerate((stdin, stdout, stderr))
        ]
        # Python ignores both signals; a container's process must not inherit that.
        defaults = (signal.SIGXFSZ,) if outlives_readers else (signal.SIGPIPE, signal.SIGXFSZ)
        log.debug("spawn", extra={"argv": " ".join(argv)})
        try:
            pid = os.posix_spawn(argv[0], argv, environment, file_actions=actions, setsigdef=defaults, setsigmask=())
        except OSError as error:
            raise Internal(f"run {argv[0]!r}: {os_cause(error)}") from error
        return self._adopt(pid)

    async def run(
        self,
        argv: list[str],
        *,
        stdin: bytes = b"",
        timeout_s: float = 60.0,
        environment: Mapping[str, str] = ENVIRONMENT,
        doing: str = "",
    ) -> Finished:
        """The program's end and output. After `timeout_s` the program is killed and DeadlineExceeded raised.

        `doing` begins the error's text in place of the program's name.
        """
        with _scratch(stdin) as given, _scratch() as out, _scratch() as err:
            child = self.spawn(
                argv, stdin=given.fileno(), stdout=out.fileno(), stderr=err.fileno(), environment=environment
            )
            try:
                async with asyncio.timeout(timeout_s):
                    code = await child.wait()
            except TimeoutError:
                what = doing or f"run {argv[0]!r}"
                raise DeadlineExceeded(f"{what}: still running after {timeout_s:g} s, killed") from None
            finally:
                child.send_signal(signal.SIGKILL)
            return Finished(code, _written(out), _written(err))

    async def load_modules(self, *modules: str) -> None:
        """The modules that the guest has are loaded; one that is built in cannot be, and need not be."""
        program = find_program("modprobe")
        if program is None:
            return
        for module in modules:
            ended = await self.run([program, module], timeout_s=_LOAD_TIMEOUT_S)
            if ended.code:
                log.info("module not loaded", extra={"kernel_module": module, "error": ended.complaint})

    async def call(
        self,
        name: str,
        *arguments: str,
        doing: str,
        stdin: bytes = b"",
        timeout_s: float = 60.0,
        missing: type[AgentError] = Internal,
    ) -> bytes:
        """The output of the guest's program `name`, which has ended well. Raises `missing` if the guest has none.

        Internal has the program's complaint. `doing` begins each error's text.
        """
        program = find_program(name)
        if program is None:
            raise missing(f"{doing}: the guest has no {name}")
        ended = await self.run([program, *arguments], stdin=stdin, timeout_s=timeout_s, doing=doing)
        if ended.code != 0:
            raise Internal(f"{doing}: {ended.complaint or f'{name} exited {ended.code}'}")
        return ended.stdout

    # -- processes that were not spawned here --------------------------------------------------------------------------

    @contextmanager
    def expecting(self) -> Iterator[Callable[[int], Child]]:
        """Yields a function that makes a `Child` of a pid, for a process that becomes this one's child within the
        block.

        The exit codes of unknown children are stored until the end of the block, so an early end is not missed.
        """
        self._expecting += 1
        try:
            yield self._adopt
        finally:
            self._expecting -= 1
            if self._expecting == 0:
                self._unclaimed.clear()

    def _adopt(self, pid: int) -> Child:
        child = Child(pid)
        if pid in self._unclaimed:
            child.end(self._unclaimed.pop(pid))
        else:
            self._running[pid] = child
        return child


def _scratch(content: bytes = b"") -> BinaryIO:
    """A nameless file with `content`, at its beginning."""
    file = os.fdopen(os.memfd_create("scratch"), "r+b", buffering=0)
    file.write(content)
    file.seek(0)
    return file


def _written(file: BinaryIO) -> bytes:
    return os.pread(file.fileno(), _MAX_OUTPUT_BYTES, 0)
