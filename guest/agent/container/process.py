"""One process of a container: its pid, its stdio, its latched end."""

from __future__ import annotations

import os

from guest.agent import log
from guest.agent.errors import Internal
from guest.agent.runtime.loop import Loop, Promise
from guest.agent.runtime.streams import Sink, Source

# A process that ended and was waited for keeps unread output this long, for a reader that is late.
_KEEP_OUTPUT_S = 30.0


class Process:
    """`exec_id` is "" for init. `exited` holds the exit code (128 + signal when killed), for any number of waiters, for
    ever.
    """

    def __init__(self, loop: Loop, exec_id: str, *, has_terminal: bool) -> None:
        self._loop = loop
        self.exec_id = exec_id
        self.has_terminal = has_terminal
        self.pid = 0
        self.exited = Promise(loop)
        self.stdin: Sink | None = None
        self.stdout: Source | None = None
        self.stderr: Source | None = None
        self.terminal_fd = -1

    def started(self, pid: int, exit: Promise) -> None:
        """The process runs as `pid`; `exit` is its reaped end."""
        self.pid = pid

        def ended() -> None:
            log.info("process exited", exec=self.exec_id or "init", pid=pid, code=exit.value)
            for source in (self.stdout, self.stderr):
                if source is not None:
                    source.process_exited()
            self.exited.resolve(exit.value)

        exit.when_done(ended)

    def set_terminal(self, master: int) -> None:
        """The process's stdio is the terminal with this master fd, which is now owned here."""
        self.terminal_fd = master
        self.stdin = Sink(self._loop, os.dup(master))
        self.stdout = Source(self._loop, os.dup(master))

    def was_waited_for(self) -> None:
        """Output nobody reads is thrown away in a while."""
        self._loop.call_later(_KEEP_OUTPUT_S, self.close)

    def is_finished(self) -> bool:
        """Whether it ended and all its output was read or thrown away."""
        return self.exited.done and all(source is None or source.at_end for source in (self.stdout, self.stderr))

    def close(self) -> None:
        """Every stream is closed; readers see the end. Idempotent."""
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        if self.terminal_fd >= 0:
            os.close(self.terminal_fd)
            self.terminal_fd = -1


class Stdio:
    """The fds crun is started with, and the promise that they become a `Process`'s streams.

    Use as: `stdio = Stdio(...)`, run crun with `stdio.child_fds` and `stdio.console`, then `attach` or `abandon`.
    """

    def __init__(self, loop: Loop, *, terminal: bool, console_path: str, pipe_size: int) -> None:
        self._loop = loop
        self._parent_fds: list[int] = []
        self._listener = None
        self.child_fds = (-1, -1, -1)
        self.console: str | None = None
        if terminal:
            import _socket

            self._listener = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
            self._listener.bind(console_path)
            self._listener.listen(1)
            self._listener.setblocking(False)
            self.console = console_path
            return
        in_read, in_write = os.pipe2(os.O_CLOEXEC)
        out_read, out_write = os.pipe2(os.O_CLOEXEC)
        err_read, err_write = os.pipe2(os.O_CLOEXEC)
        self._parent_fds = [in_write, out_read, err_read]
        self.child_fds = (in_read, out_write, err_write)
        if pipe_size:
            import fcntl

            for fd in self._parent_fds:
                try:
                    fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, pipe_size)
                except OSError as error:
                    log.warning("pipe size refused", bytes=pipe_size, error=error)

    def attach(self, process: Process) -> None:
        """crun is done and left the process running: the process has its streams, the child's fds are closed."""
        if self._listener is not None:
            process.set_terminal(self._receive_master())
        else:
            in_write, out_read, err_read = self._parent_fds
            self._parent_fds = []
            process.stdin = Sink(self._loop, in_write)
            process.stdout = Source(self._loop, out_read)
            process.stderr = Source(self._loop, err_read)
        self.abandon()

    def _receive_master(self) -> int:
        import _socket

        assert self._listener is not None
        try:
            fd, _address = self._listener._accept()  # type: ignore[attr-defined]
        except BlockingIOError:
            raise Internal("receive terminal: crun did not connect to its console socket") from None
        connection = _socket.socket(fileno=fd)
        try:
            connection.settimeout(5.0)
            _data, ancillary, _flags, _address = connection.recvmsg(
                4096, _socket.CMSG_SPACE(4), _socket.MSG_CMSG_CLOEXEC
            )
        finally:
            connection.close()
        for level, kind, payload in ancillary:
            if (level, kind) == (_socket.SOL_SOCKET, _socket.SCM_RIGHTS) and len(payload) >= 4:
                return int.from_bytes(payload[:4], "little")
        raise Internal("receive terminal: crun sent no file descriptor")

    def abandon(self) -> None:
        """Every fd still owned here is closed."""
        for fd in (*self._parent_fds, *(fd for fd in self.child_fds if fd >= 0)):
            os.close(fd)
        self._parent_fds, self.child_fds = [], (-1, -1, -1)
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            if self.console is not None:
                os.unlink(self.console)
                self.console = None
