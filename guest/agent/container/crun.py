"""Runs crun and raises its error texts; the processes that crun leaves behind, with their streams and terminals."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import socket
import termios
from contextlib import suppress
from functools import cached_property
from struct import pack
from typing import NamedTuple

from guest.agent import mounts, syscalls
from guest.agent.children import Child, Children, find_program
from guest.agent.errors import Internal
from guest.agent.files import opened, remove_file, remove_tree
from guest.agent.streams import ReadEnd, WriteEnd

log = logging.getLogger(__name__)

RUN_DIR = "/run/pyshim-agent"
# Of crun's log in an error.
_MAX_ERROR_BYTES = 4096
_CGROUP_ROOT = "/sys/fs/cgroup"
# Source: linux/capability.h.
_CAP_SYS_ADMIN, _CAP_SYS_RESOURCE = 21, 24


class CrunStdio(NamedTuple):
    """The stdio of a process that crun starts: three descriptors (-1: /dev/null), or a terminal whose master crun sends
    to the socket at the path `console`.
    """

    fds: tuple[int, int, int] = (-1, -1, -1)
    console: str | None = None

    @property
    def options(self) -> list[str]:
        return [] if self.console is None else [f"--console-socket={self.console}"]


_NO_STDIO = CrunStdio()


class Crun:
    """Calls of crun, which end when crun does; the event loop runs meanwhile.

    One per agent, which is process 1 or a subreaper: processes that crun starts become its children."""

    def __init__(self, children: Children, *, pipe_size: int) -> None:
        """`pipe_size` is that of each stdio pipe in bytes, 0 for the kernel's default."""
        self.children = children
        self.pipe_size = pipe_size
        self._serial = 0

    @cached_property
    def has_cgroups(self) -> bool:
        """True if the guest has cgroup v2; crun and the agent use no other."""
        return os.path.exists(f"{_CGROUP_ROOT}/cgroup.controllers")

    @cached_property
    def limits_devices(self) -> bool:
        """True if device rules can be enforced. On cgroup v2 they are a BPF program, for which crun raises a limit."""
        return self.has_cgroups and all(map(syscalls.has_capability, (_CAP_SYS_ADMIN, _CAP_SYS_RESOURCE)))

    @cached_property
    def _base(self) -> list[str]:
        program = find_program("crun")
        if program is None:
            raise Internal("run crun: no executable of that name")
        return [program, f"--root={RUN_DIR}/crun", f"--cgroup-manager={'cgroupfs' if self.has_cgroups else 'disabled'}"]

    def scratch(self, suffix: str) -> str:
        """A path that no other call uses; the caller removes the file."""
        os.makedirs(RUN_DIR, mode=0o700, exist_ok=True)
        self._serial += 1
        return f"{RUN_DIR}/{self._serial}.{suffix}"

    async def create(self, cid: str, bundle: str, pid_file: str, stdio: CrunStdio) -> None:
        """The container waits to be started. crun's log stays in the bundle."""
        options = [f"--bundle={bundle}", f"--pid-file={pid_file}", *stdio.options]
        if _root_is_initramfs():
            options.append("--no-pivot")
        doing = f"create container {cid!r}"
        await self._run("create", [*options, "--", cid], doing, stdio, log_file=f"{bundle}/crun.log")

    async def start(self, cid: str, *, has_hooks: bool) -> None:
        """The waiting init has gone on, and with `has_hooks` the container's poststart hooks have run."""
        if has_hooks or not _start_init(f"{RUN_DIR}/crun/{cid}/exec.fifo"):
            await self._run("start", ["--", cid], f"start container {cid!r}")

    async def execute(self, cid: str, process_file: str, pid_file: str, stdio: CrunStdio) -> None:
        """The process of `process_file` runs in the container."""
        options = ["--detach", f"--process={process_file}", f"--pid-file={pid_file}", *stdio.options]
        await self._run("exec", [*options, "--", cid], f"exec in container {cid!r}", stdio)

    async def delete(self, cid: str) -> None:
        """The container is gone and its processes are killed; nothing happens if crun has no such container."""
        if os.path.exists(f"{RUN_DIR}/crun/{cid}"):
            # crun writes the container's state to hooks, and a hook may end without reading it.
            arguments = ["--force", "--", cid]
            await self._run("delete", arguments, f"remove container {cid!r}", outlives_readers=True)

    def forget(self, cid: str) -> None:
        """Does the work of `crun delete` for a container without processes, cgroup and hooks, and saves its start."""
        remove_tree(f"{RUN_DIR}/crun/{cid}")

    async def pause(self, cid: str) -> None:
        await self._run("pause", ["--", cid], f"pause container {cid!r}")

    async def resume(self, cid: str) -> None:
        await self._run("resume", ["--", cid], f"resume container {cid!r}")

    async def update(self, cid: str, resources_file: str) -> None:
        await self._run("update", [f"--resources={resources_file}", "--", cid], f"update container {cid!r}")

    async def _run(
        self,
        command: str,
        arguments: list[str],
        doing: str,
        stdio: CrunStdio = _NO_STDIO,
        *,
        outlives_readers: bool = False,
        log_file: str = "",
    ) -> None:
        # stderr may be the container's own, so crun's error text comes from its log file.
        keeps_log = bool(log_file)
        log_file = log_file or self.scratch("log")
        argv = [*self._base, f"--log=file:{log_file}", command, *arguments]
        stdin, stdout, stderr = stdio.fds
        try:
            child = self.children.spawn(
                argv, stdin=stdin, stdout=stdout, stderr=stderr, outlives_readers=outlives_readers
            )
            code = await child.wait()
            if code != 0:
                raise Internal(f"{doing}: {_error_text(log_file) or f'crun {command} exited {code}'}")
        finally:
            if not keeps_log:
                remove_file(log_file)


def _start_init(fifo: str) -> bool:
    """Does the work of `crun start` for a container without hooks, and saves the start of a program.

    Init reads the FIFO; while it exists, crun considers the container not started. False if this fails: then crun is
    called and reports the reason. Source: crun's src/libcrun/status.c.
    """
    with suppress(OSError), opened(fifo, os.O_WRONLY | os.O_NONBLOCK) as fd:
        os.unlink(fifo)
        return os.write(fd, b"\0") == 1
    return False


def _error_text(log_file: str) -> str:
    with suppress(FileNotFoundError), open(log_file, "rb") as file:
        text = file.read(_MAX_ERROR_BYTES).decode("utf-8", "replace")
        return "; ".join(line.strip() for line in text.splitlines() if line.strip())
    return ""


def _root_is_initramfs() -> bool:
    # pivot_root(2) cannot leave the initial root file system. That has no device, as the image's own root has.
    if os.major(os.stat("/").st_dev):
        return False
    return mounts.mounted_type("/") == "rootfs"


# -- processes ---------------------------------------------------------------------------------------------------------

# Seconds. Unread output of a process that has ended and was waited for is dropped after this time.
_KEEP_OUTPUT_S = 30.0
# crun has ended by then, so the terminal's master has been sent already.
_RECEIVE_S = 5.0


class Process:
    """A process that crun has left behind. `exec_id` is "" for init, `stderr` None with a terminal.

    `stdin` is None when no client writes to it: then it is /dev/null.

    `terminal` is the master's fd, -1 without one.
    """

    def __init__(
        self,
        exec_id: str,
        child: Child,
        *,
        stdin: WriteEnd | None,
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

    def __init__(self, *, terminal: bool, has_stdin: bool, console_path: str, pipe_size: int) -> None:
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
        in_read, in_write = os.pipe() if has_stdin else (-1, -1)
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        self._ours = (in_write, out_read, err_read)
        self.for_crun = CrunStdio(fds=(in_read, out_write, err_write))
        for fd in self._ours:
            if not pipe_size or fd < 0:
                continue
            try:
                fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, pipe_size)
            except OSError as error:
                log.warning("pipe size refused", extra={"bytes": pipe_size, "error": error})

    def attach(self, exec_id: str, child: Child) -> Process:
        """The process that crun left behind, which now owns its streams."""
        if self._listener is not None:
            master = _receive_master(self._listener)
            inward, outward = WriteEnd(os.dup(master)), ReadEnd(os.dup(master))
            return Process(exec_id, child, stdin=inward, stdout=outward, stderr=None, terminal=master)
        (in_write, out_read, err_read), self._ours = self._ours, ()
        stdin = WriteEnd(in_write) if in_write >= 0 else None
        return Process(exec_id, child, stdin=stdin, stdout=ReadEnd(out_read), stderr=ReadEnd(err_read))

    def close(self) -> None:
        """Every fd that is still owned here is closed, also crun's ends."""
        for fd in (*self._ours, *self.for_crun.fds):
            if fd >= 0:
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
