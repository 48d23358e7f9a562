"""The only place that starts and reaps processes.

A child is started by posix_spawn (`launch.py`: no Python runs between fork and exec), watched by a pidfd on the event
loop and reaped by `waitid(P_PIDFD)`, so a signal never reaches a recycled pid. It gets exactly the descriptors it was
given, default signals and its own session. Source of the pidfd rule: pidfd_open(2); cpython issue 127049 shows what
goes wrong otherwise.
"""

import asyncio
import errno
import logging
import os
import shlex
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from types import MappingProxyType

import msgspec

from pyshim.host.fds import OwnedFd, until_readable
from pyshim.host.os_errors import os_errors
from pyshim.host.processes.launch import AS_THE_SHIM, Isolation, Launch, SpawnFailed, file_actions, kill_and_reap
from pyshim.host.processes.rights import excess
from pyshim.host.processes.stat import start_ticks_of
from pyshim.host.untrusted_text import PacedText
from pyshim.model.errors import DeadlineExceeded, ShimError
from pyshim.model.ledger import Ledger, LedgerEntry, ResourceKind

log = logging.getLogger(__name__)

_EXEC_PAUSES_S = (0.0, 0.001, 0.01, 0.1, 0.5)
"""Seconds between looks at a program that has just been started; a crowded host may take that long to go on."""

PROGRAM_ENV: Mapping[str, str] = MappingProxyType({"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"})
"""The default environment of a program, without variables of containerd."""
_NO_FDS: Mapping[int, int] = MappingProxyType({})
KILL_WAIT_S = 10.0
"""Seconds for a killed process to end: it may write a core file, or have much memory to free."""
_READ_BYTES = 65536
"""Bytes of one read: the size of a pipe."""
_LOGGED_LINES = 500
"""Lines of one child's stderr that are logged: a guest can make a VMM print without end."""


class ChildExit(msgspec.Struct, frozen=True):
    """The end of a process: its `code`, or the number of the signal that killed it."""

    code: int
    signal: int

    def __str__(self) -> str:
        if not self.signal:
            return f"exited with status {self.code}"
        return f"was killed by {signal_name(self.signal)}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Child:
    """One process of ours, from spawn to reaped. Made by `Children.spawn`."""

    def __init__(
        self, *, name: str, pid: int, stderr: OwnedFd | None, tail_lines: int, on_exit: Callable[["Child"], None]
    ):
        self.name = name
        self.pid = pid
        self.start_ticks = start_ticks_of(pid)
        self._loop = asyncio.get_running_loop()
        self._log = log.getChild(name)
        self._exit: asyncio.Future[ChildExit] = self._loop.create_future()
        self._on_exit = on_exit
        self._logged_lines = 0
        self._pidfd = os.pidfd_open(pid)
        self._stderr: PacedText | None = None
        try:
            self._loop.add_reader(self._pidfd, self._reap)
            if stderr is not None:
                self._stderr = PacedText(stderr, max_lines=tail_lines, on_line=self._log_line)
        except OSError:
            # The caller reaps the process. A loop that still watched it would call `_reap` for ever.
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            raise

    @property
    def exit(self) -> ChildExit | None:
        """Its exit; None while it runs."""
        return self._exit.result() if self._exit.done() else None

    async def wait(self) -> ChildExit:
        """Its exit, once it has ended. All waiters get the same answer; cancelling one does not disturb the others."""
        return await asyncio.shield(self._exit)

    def kill(self, signal_number: int = signal.SIGKILL) -> bool:
        """The signal is sent, to this very process; False when it has already ended."""
        if self._exit.done():
            return False
        try:
            signal.pidfd_send_signal(self._pidfd, signal_number)
        except ProcessLookupError:
            return False
        return True

    async def end(self, *, signal_number: int = signal.SIGKILL, grace_s: float = 0.0) -> ChildExit:
        """It has ended: by `signal_number`, or by SIGKILL when it has not obeyed within `grace_s`.

        Raises DeadlineExceeded when even SIGKILL has not ended it within KILL_WAIT_S: the kernel holds it in an
        uninterruptible wait, for a dead disk or file server, for an unbounded time.
        """
        if grace_s > 0:
            self.kill(signal_number)
            with suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    return await self.wait()
        self.kill(signal.SIGKILL)
        try:
            async with asyncio.timeout(KILL_WAIT_S):
                return await self.wait()
        except TimeoutError:
            raise DeadlineExceeded(
                f"end {self.name} (pid {self.pid}): it lives {KILL_WAIT_S:g} s after SIGKILL"
            ) from None

    def last_words(self) -> tuple[str, ...]:
        """The last lines it wrote to stderr, without control characters."""
        return self._stderr.tail.lines() if self._stderr is not None else ()

    def describe_exit(self) -> str:
        """`qemu (pid 12) was killed by SIGKILL: <its last words>`, for error texts."""
        state = str(self._exit.result()) if self._exit.done() else "is running"
        words = "; ".join(self.last_words())
        return f"{self.name} (pid {self.pid}) {state}" + (f": {words}" if words else "")

    def _reap(self) -> None:
        """The pidfd is readable: the process is a zombie. Its last output is read before its end is reported."""
        result = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
        if result is None:
            return
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        if self._stderr is not None:
            self._stderr.drain()
            self._stderr.close()
        exited = result.si_code == os.CLD_EXITED
        self._exit.set_result(ChildExit(result.si_status, 0) if exited else ChildExit(0, result.si_status))
        self._log.debug("child ended", extra={"pid": self.pid, "exit": str(self._exit.result())})
        self._on_exit(self)

    def _log_line(self, line: str) -> None:
        self._logged_lines += 1
        if self._logged_lines <= _LOGGED_LINES:
            self._log.info("stderr", extra={"pid": self.pid, "line": line})
        if self._logged_lines == _LOGGED_LINES:
            self._log.warning("further stderr lines are not logged", extra={"pid": self.pid})


class Children:
    """Every process the shim has started and not yet reaped. One per shim, used from its event loop."""

    def __init__(self) -> None:
        self._alive: dict[int, Child] = {}

    @property
    def alive(self) -> tuple[Child, ...]:
        return tuple(self._alive.values())

    async def spawn(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] = PROGRAM_ENV,
        program: str = "",
        fds: Mapping[int, int] = _NO_FDS,
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
        isolation: Isolation = AS_THE_SHIM,
        dumps_core: bool = False,
        new_session: bool = True,
        stderr_tail_lines: int = 20,
        ledger: Ledger | None = None,
        ledger_key: str = "",
    ) -> Child:
        """The program at `program`, or else at `argv[0]`, runs. `fds` maps its descriptors (3 and up) to ours, which
        stay ours.

        Without `dumps_core` a crash writes nothing of its memory to the host: it may be a guest's.
        stdin and stdout are /dev/null unless given; stderr is read into the child's tail and the log unless given.
        With a `ledger`, the intent is recorded under `ledger_key` (a text of its argv) before the process exists, and
        its pid right after; striking it out is the caller's, once the process has ended. Raises SpawnFailed.
        """
        launch = Launch(
            program=program or argv[0], argv=tuple(argv), env=dict(env), new_session=new_session, dumps_core=dumps_core
        )
        entry = LedgerEntry(kind=ResourceKind.PROCESS, key=ledger_key, detail={"program": argv[0]})
        if ledger is not None:
            assert ledger_key, "a process is recorded under a key"
            assert any(ledger_key in word for word in argv), "a sweeper must find the key in the argv"
            ledger.acquire(entry)
        try:
            child = await self._start(launch, isolation, {0: stdin, 1: stdout, 2: stderr, **fds}, stderr_tail_lines)
        except BaseException:
            if ledger is not None:
                await ledger.release(entry)
            raise
        if ledger is not None:
            detail = {**entry.detail, "pid": child.pid, "start_ticks": child.start_ticks}
            try:
                ledger.acquire(LedgerEntry(kind=ResourceKind.PROCESS, key=ledger_key, detail=detail))
            except ShimError:
                await child.end()
                await ledger.release(entry)
                raise
        return child

    async def _start(
        self, launch: Launch, isolation: Isolation, taken: Mapping[int, int | None], stderr_tail_lines: int
    ) -> Child:
        if log.isEnabledFor(logging.DEBUG):
            log.debug("spawn", extra={"command": shlex.join(launch.argv)})
        stderr: OwnedFd | None = None
        try:
            where = "" if isolation.view is None else " in its view"
            with os_errors(f"start program {launch.program!r}{where}", SpawnFailed), ExitStack() as ends:
                if taken[2] is None:
                    stderr, write_end = _tail_pipe()
                    taken = {**taken, 2: ends.enter_context(write_end).fileno()}
                actions = ends.enter_context(file_actions(taken))
                pid = launch.run(actions) if isolation == AS_THE_SHIM else await launch.run_isolated(actions, isolation)
            with os_errors(f"watch program {launch.program!r}", SpawnFailed):
                child = await self._watched(launch, pid, stderr, stderr_tail_lines, isolation.capabilities)
        except BaseException:
            if stderr is not None:
                stderr.close()
            raise
        self._alive[pid] = child
        return child

    async def _watched(
        self, launch: Launch, pid: int, stderr: OwnedFd | None, tail_lines: int, allowed: Collection[int] | None
    ) -> Child:
        """The child, if no thread of it has a capability beside `allowed`; it can gain none. Raises OSError."""
        name = os.path.basename(launch.program)
        try:
            if allowed is not None and (found := await _excess_of_program(pid, allowed)):
                raise PermissionError(errno.EPERM, found)
            return Child(name=name, pid=pid, stderr=stderr, tail_lines=tail_lines, on_exit=self._forget)
        except BaseException:
            kill_and_reap(pid)
            raise

    def _forget(self, child: Child) -> None:
        del self._alive[child.pid]

    async def output(
        self, argv: Sequence[str], *, env: Mapping[str, str] = PROGRAM_ENV, timeout_s: float, max_bytes: int = 1 << 20
    ) -> tuple[ChildExit, bytes]:
        """The program's exit and the first `max_bytes` of its stdout; it is killed after `timeout_s`."""
        read_end, write_end = _tail_pipe()
        with read_end:
            with write_end:
                child = await self.spawn(argv, env=env, stdout=write_end.fileno())
            try:
                async with asyncio.timeout(timeout_s):
                    data = await _read_to_end(read_end.fileno(), max_bytes)
                    return await child.wait(), data
            except TimeoutError:
                raise DeadlineExceeded(f"run program {argv[0]!r}: no end within {timeout_s:g} s") from None
            finally:
                await child.end()

    async def end_all(self) -> None:
        """Every child has been killed and reaped, unless it is in an uninterruptible wait. Called as the shim ends."""
        for child in self.alive:
            child.kill()
        for result in await asyncio.gather(*(child.end() for child in self.alive), return_exceptions=True):
            if isinstance(result, BaseException):
                log.error("child left behind", extra={"error": str(result)})


def _tail_pipe() -> tuple[OwnedFd, OwnedFd]:
    """Our end, which does not block, and the child's, which blocks."""
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(read_fd, False)
    return OwnedFd(read_fd), OwnedFd(write_fd)


async def _read_to_end(fd: int, max_bytes: int) -> bytes:
    data = bytearray()
    while True:
        await until_readable(fd)
        with suppress(BlockingIOError):
            chunk = os.read(fd, _READ_BYTES)
            if not chunk:
                return bytes(data[:max_bytes])
            if len(data) < max_bytes:
                data += chunk


async def _excess_of_program(pid: int, allowed: Collection[int]) -> str:
    """As `excess`, of the program that the process executes.

    The kernel lets the caller of vfork go on a moment before the program's capabilities are in place (fs/exec.c,
    begin_new_exec: exec_mmap precedes commit_creds). So what is found is looked at again.
    """
    for pause_s in _EXEC_PAUSES_S:
        if not (found := excess(pid, allowed)):
            return ""
        await asyncio.sleep(pause_s)
    return found
