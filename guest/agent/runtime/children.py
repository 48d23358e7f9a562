"""Child processes: spawned with posix_spawn, reaped in one place, orphans included.

The agent is PID 1 or a child subreaper: every process of the guest whose parent dies becomes its child, so only `_reap`
may wait, and it waits for everything. Processes that crun leaves behind are claimed with `adopt`.
"""

from __future__ import annotations

import os

from guest.agent import log
from guest.agent.errors import DeadlineExceeded, Internal, os_cause
from guest.agent.runtime.loop import Cancelled, Loop, Promise
from guest.agent.runtime.signals import SIGKILL, SIGPIPE, SIGXFSZ, wake_on_children

_MAX_OUTPUT_BYTES = 1 << 20
_SEARCH = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
ENVIRONMENT = {"PATH": ":".join(_SEARCH)}


class Finished:
    """How a child ended: `code` is the exit status, or 128 + signal; `stdout` and `stderr` are what it wrote, at most 1
    MiB each.
    """

    __slots__ = ("code", "stderr", "stdout")

    def __init__(self, code: int, stdout: bytes, stderr: bytes) -> None:
        self.code = code
        self.stdout = stdout
        self.stderr = stderr


def find_program(name: str) -> str | None:
    """The first executable called `name` on the agent's fixed search path."""
    for folder in _SEARCH:
        path = f"{folder}/{name}"
        if os.access(path, os.X_OK):
            return path
    return None


def exit_code(wait_status: int) -> int:
    """Exit status as containers report it: 0-255, or 128 + the number of the signal that killed the process."""
    code = os.waitstatus_to_exitcode(wait_status)
    return code if code >= 0 else 128 - code


def _fix_addresses() -> int:
    """Programs that are started from now on have the same addresses every time; what was before, to be set again.

    posix_spawn has no word for a child's personality: it inherits its parent's.
    """
    from guest.agent.storage.syscalls import ADDR_NO_RANDOMIZE, set_personality

    return set_personality(ADDR_NO_RANDOMIZE)


def _set_personality(persona: int) -> None:
    from guest.agent.storage.syscalls import set_personality

    set_personality(persona)


class Children:
    """Owner of SIGCHLD. One per process."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._exits: dict[int, Promise] = {}
        self._unclaimed: dict[int, int] = {}
        self._expecting = 0
        self._null = os.open("/dev/null", os.O_RDWR)
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def start(self) -> None:
        """SIGCHLD now wakes the loop."""
        wake_on_children(self._wake_write)
        self._loop.watch(self._wake_read, 1, self._woken)

    def _woken(self, _events: int) -> None:
        try:
            while os.read(self._wake_read, 512):
                pass
        except BlockingIOError:
            pass
        self._reap()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            promise = self._exits.pop(pid, None)
            if promise is not None:
                promise.resolve(exit_code(status))
            elif self._expecting:
                self._unclaimed[pid] = exit_code(status)

    def spawn(
        self,
        argv: list[str],
        *,
        stdin: int = -1,
        stdout: int = -1,
        stderr: int = -1,
        outlives_readers: bool = False,
        fixed_addresses: bool = False,
    ) -> Promise:
        """The program runs with the given fds (-1: /dev/null); the promise holds its exit code. `argv[0]` is an
        absolute path. With `outlives_readers` a write that nobody reads fails, instead of ending the program (SIGPIPE).
        With `fixed_addresses` it, and what it starts in turn, has the same addresses every time.
        """
        files = (stdin, stdout, stderr)
        actions = [(os.POSIX_SPAWN_DUP2, self._null if fd < 0 else fd, number) for number, fd in enumerate(files)]
        # Python starts with both ignored; a container's process must not inherit that.
        defaults = (SIGXFSZ,) if outlives_readers else (SIGPIPE, SIGXFSZ)
        log.debug("spawn", argv=" ".join(argv))
        own_personality = _fix_addresses() if fixed_addresses else None
        try:
            pid = os.posix_spawn(argv[0], argv, ENVIRONMENT, file_actions=actions, setsigdef=defaults, setsigmask=())
        except OSError as error:
            raise Internal(f"run {argv[0]!r}: {os_cause(error)}") from error
        finally:
            if own_personality is not None:
                _set_personality(own_personality)
        return self.adopt(pid)

    async def run(self, argv: list[str], *, stdin: bytes = b"", timeout_s: float = 60.0) -> Finished:
        """The program's end with its output. After `timeout_s` it is killed and DeadlineExceeded is raised."""
        in_read, in_write = os.pipe2(os.O_CLOEXEC)
        out_read, out_write = os.pipe2(os.O_CLOEXEC)
        err_read, err_write = os.pipe2(os.O_CLOEXEC)
        try:
            exited = self.spawn(argv, stdin=in_read, stdout=out_write, stderr=err_write)
        except Internal:
            for fd in (in_write, out_read, err_read):
                os.close(fd)
            raise
        finally:
            for fd in (in_read, out_write, err_write):
                os.close(fd)
        pid = next(pid for pid, promise in self._exits.items() if promise is exited)
        name = argv[0]
        feed = self._loop.spawn(f"stdin of {name}", self._feed(in_write, stdin))
        out = self._loop.spawn(f"stdout of {name}", self._drain(out_read))
        err = self._loop.spawn(f"stderr of {name}", self._drain(err_read))
        expired = False

        def expire() -> None:
            nonlocal expired
            expired = True
            self._kill(pid)

        timer = self._loop.call_later(timeout_s, expire)
        try:
            code = await exited
            output = await out.result, await err.result
        finally:
            timer.cancel()
            for task in (feed, out, err):
                task.cancel()
        if expired:
            raise DeadlineExceeded(f"run {name!r}: still running after {timeout_s:g} s, killed")
        return Finished(code, *output)

    def _kill(self, pid: int) -> None:
        if pid in self._exits:  # not reaped, so the number is still this child's
            os.kill(pid, SIGKILL)

    async def _feed(self, fd: int, data: bytes) -> None:
        os.set_blocking(fd, False)
        view = memoryview(data)
        try:
            while view:
                try:
                    view = view[os.write(fd, view) :]
                except BlockingIOError:
                    await self._loop.wait_fd(fd, 4)
        except BrokenPipeError:
            pass  # it did not want to read all of it; its exit code tells
        finally:
            os.close(fd)

    async def _drain(self, fd: int) -> bytes:
        os.set_blocking(fd, False)
        chunks: list[bytes] = []
        size = 0
        try:
            while True:
                try:
                    chunk = os.read(fd, 65536)
                except BlockingIOError:
                    await self._loop.wait_fd(fd, 1)
                    continue
                if not chunk:
                    return b"".join(chunks)
                if size < _MAX_OUTPUT_BYTES:
                    chunks.append(chunk)
                    size += len(chunk)
        except Cancelled:
            return b"".join(chunks)
        finally:
            os.close(fd)

    # -- processes we did not spawn --------------------------------------------------------------------------------

    def expect(self) -> None:
        """From now until `expected`, exits of unknown children are kept, so that `adopt` cannot miss one."""
        self._expecting += 1

    def expected(self) -> None:
        self._expecting -= 1
        if self._expecting == 0:
            self._unclaimed.clear()

    def adopt(self, pid: int) -> Promise:
        """A promise of `pid`'s exit code; call between `expect` and `expected` unless `pid` was just spawned."""
        promise = Promise(self._loop)
        if pid in self._unclaimed:
            promise.resolve(self._unclaimed.pop(pid))
        else:
            self._exits[pid] = promise
        return promise

    def is_running(self, pid: int) -> bool:
        """Whether `pid` is ours and not reaped: only then may it be signalled by number."""
        return pid in self._exits
