"""One process of a container: its streams, its terminal, its end."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import socket
import termios
from struct import pack

from guest.agent.children import Child
from guest.agent.container.crun import CrunStdio
from guest.agent.errors import Internal
from guest.agent.files import remove_file
from guest.agent.streams import ReadEnd, WriteEnd

log = logging.getLogger(__name__)

# Seconds. Unread output of a process that has ended and was waited for is dropped after this time.
_KEEP_OUTPUT_S = 30.0
# crun has ended by then, so the terminal's master has been sent already.
_RECEIVE_S = 5.0


class Process:
    """A process that crun has left behind. `exec_id` is "" for init, `stderr` None with a terminal.

    `terminal` is the master's fd, -1 without one.
    """

    def __init__(
        self,
        exec_id: str,
        child: Child,
        *,
        stdin: WriteEnd,
        stdout: ReadEnd,
        stderr: ReadEnd | None,
        terminal: int = -1,
    ) -> None:
        self.exec_id = exec_id
        self.child = child
        self.pid = child.pid
        self.stdin = stdin
        self.stdout = stdout
        self.stderr = stderr
        self._terminal = terminal
        self._dropping: asyncio.TimerHandle | None = None
        child.when_ended(self._ended)

    @property
    def has_exited(self) -> bool:
        return not self.child.is_running

    @property
    def has_terminal(self) -> bool:
        return self._terminal >= 0

    def _ended(self, code: int) -> None:
        log.info("process exited", extra={"exec": self.exec_id or "init", "pid": self.pid, "code": code})

    @property
    def _outputs(self) -> tuple[ReadEnd, ...]:
        return (self.stdout,) if self.stderr is None else (self.stdout, self.stderr)

    async def wait(self) -> int:
        """The exit code (128 + signal when killed), to every caller.

        Output stays readable, also that of children that outlive the process. It is dropped if it is not read.
        """
        code = await self.child.wait()
        if self._dropping is None:
            self._drop_later()
        return code

    def _drop_later(self) -> None:
        self._dropping = asyncio.get_running_loop().call_later(_KEEP_OUTPUT_S, self._drop_unread)

    def _drop_unread(self) -> None:
        unread = [source.is_unread() for source in self._outputs]  # ask all of them: the question has an effect
        if all(unread):
            self.close()
        else:
            self._drop_later()

    def is_finished(self) -> bool:
        """It has ended, and all its output was read or dropped."""
        return self.has_exited and all(source.closed for source in self._outputs)

    def resize_terminal(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, pack("HHHH", rows, columns, 0, 0))

    def close(self) -> None:
        """Every stream is closed; readers see the end. Idempotent."""
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        if self._terminal >= 0:
            os.close(self._terminal)
            self._terminal = -1


class Stdio:
    """Both ends of a process's streams while crun starts it: `for_crun`, and those that `attach` gives a `Process`."""

    def __init__(self, *, terminal: bool, console_path: str, pipe_size: int) -> None:
        """`pipe_size` in bytes, 0 for the kernel's default."""
        self._listener: socket.socket | None = None
        self._ours: tuple[int, ...] = ()
        if terminal:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind(console_path)
            self._listener.listen(1)
            self._listener.setblocking(False)
            self.for_crun = CrunStdio(console=console_path)
            return
        in_read, in_write = os.pipe()
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        self._ours = (in_write, out_read, err_read)
        self.for_crun = CrunStdio(fds=(in_read, out_write, err_write))
        for fd in self._ours if pipe_size else ():
            try:
                fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, pipe_size)
            except OSError as error:
                log.warning("pipe size refused", extra={"bytes": pipe_size, "error": error})

    def attach(self, exec_id: str, child: Child) -> Process:
        """The process that crun left behind, which now owns its streams."""
        if self._listener is not None:
            master = _receive_master(self._listener)
            stdin, stdout = WriteEnd(os.dup(master)), ReadEnd(os.dup(master))
            return Process(exec_id, child, stdin=stdin, stdout=stdout, stderr=None, terminal=master)
        (in_write, out_read, err_read), self._ours = self._ours, ()
        return Process(exec_id, child, stdin=WriteEnd(in_write), stdout=ReadEnd(out_read), stderr=ReadEnd(err_read))

    def close(self) -> None:
        """Every fd that is still owned here is closed, also crun's ends."""
        for fd in (*self._ours, *(fd for fd in self.for_crun.fds if fd >= 0)):
            os.close(fd)
        if self._listener is not None:
            self._listener.close()
            remove_file(self.for_crun.console or "")


def _receive_master(listener: socket.socket) -> int:
    try:
        connection, _address = listener.accept()
    except BlockingIOError:
        raise Internal("receive terminal: crun did not connect to its console socket") from None
    with connection:
        connection.settimeout(_RECEIVE_S)
        _data, fds, _flags, _address = socket.recv_fds(connection, 4096, 1, socket.MSG_CMSG_CLOEXEC)
    if not fds:
        raise Internal("receive terminal: crun sent no file descriptor")
    return fds[0]
