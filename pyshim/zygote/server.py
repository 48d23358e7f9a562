"""The server: it has everything imported, examines each caller's request, and forks a child for it."""

import fcntl
import gc
import importlib
import math
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, NoReturn

from pyshim import log as shim_log
from pyshim.host.processes.caller import CallerDiffers, ProcessCgroups, fresh_signals, world_of
from pyshim.host.processes.confinement import DEVICE_LIST_CALL, START_CALLS, filter_program
from pyshim.host.syscalls import MADV_MERGEABLE, madvise
from pyshim.host.writers import code_paths, writable_by_others
from pyshim.start import zygote_client
from pyshim.start.daemonize import raise_oom_score
from pyshim.start.invocation import CommandError
from pyshim.zygote.code import LoadedCode
from pyshim.zygote.fork import WITHIN_S, ZYGOTES_SIGNALS, Request, become_daemon_of, checked_peer, receive, refuse, say

SHIM_MODULES = ("pyshim.serve", "concurrent.futures.thread")
"""Modules that a shim uses; asyncio imports the second one when it first needs a thread."""
_BACKLOG = 128


def run(
    *,
    directory: str,
    idle_s: float,
    modules: tuple[str, ...] = SHIM_MODULES,
    prepare: Callable[[Request], None] = lambda request: None,
) -> list[str] | None:
    """None in the zygote when it has ended: idle for `idle_s` (0: never), by a signal, or because its code changed.

    In every process that it forks this returns as well, with the words of the daemon which that process now is. What
    `prepare` makes before the fork is in the child, too. If another zygote serves the same address, this one waits
    until that ends, or ends at once if it would not stay itself.
    Raises OSError, CommandError when it cannot serve.
    """
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.chdir("/")
    os.makedirs(directory, mode=0o700, exist_ok=True)
    if os.stat(directory).st_uid != os.geteuid():
        raise CommandError(f"listen in {directory!r}: it is another user's")
    path = zygote_client.address(directory)
    lock_fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("another zygote serves here already")
        if idle_s:
            return None
        fcntl.flock(lock_fd, fcntl.LOCK_EX)
    gc.disable()
    for name in modules:
        importlib.import_module(name)
    with suppress(OSError):  # each shim says why it has none
        filter_program()
        filter_program(START_CALLS)
        filter_program((*START_CALLS, DEVICE_LIST_CALL))
    shim_log.set_up(debug=False)  # most shims find their level set
    # The interpreter caches lookups of attributes. A lookup in a child replaces an entry and so changes the reference
    # count of the name that was there, which is mostly a name of the imports, and the write would copy the name's page.
    sys._clear_type_cache()
    gc.collect()
    gc.freeze()  # no collection in a child looks at what is shared, which would copy it
    with suppress(OSError):  # a kernel built without it
        _offer_for_merging()
    raise_oom_score()
    server = _Server(path, idle_s, prepare)
    fresh_signals()
    for number in (*ZYGOTES_SIGNALS, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN if number == signal.SIGCHLD else _end)  # the kernel reaps
    try:
        words = server.serve()
    except _Ended:
        words = None
    if words is None:
        server.close()
        say("ended")
    return words


class _Ended(BaseException):
    """A signal has asked the zygote to end."""


def _end(number: int, frame: object) -> NoReturn:
    raise _Ended


class _Caller(NamedTuple):
    """A process of our world that has connected."""

    connection: socket.socket
    pid: int
    until: float
    """The end of its time to send its request."""


class _Server:
    """Listens at `path`. Raises OSError, or CommandError when its code changed while it was imported."""

    def __init__(self, path: str, idle_s: float, prepare: Callable[[Request], None]) -> None:
        self._path = path
        self._prepare = prepare
        self._world = world_of("self")
        self._cgroups = ProcessCgroups()
        self._code = LoadedCode()
        with suppress(FileNotFoundError):
            os.unlink(path)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        before = os.umask(0o177)
        self._listener.bind(path)
        os.umask(before)
        self._listener.listen(_BACKLOG)
        self._idle_s = idle_s or math.inf
        self._silent: dict[int, _Caller] = {}
        """Callers that have sent nothing yet, by descriptor and oldest first."""

    def serve(self) -> list[str] | None:
        """In a child the words of the daemon it is; None in the zygote, when it shall end."""
        if exposed := writable_by_others(code_paths()):
            say(f"warning: users other than root can change the code of shims: {', '.join(exposed)}")
        say("ready")
        while (caller := self._next_caller()) is not None:
            with caller.connection as connection:
                try:
                    request = receive(connection, caller.pid)
                except (OSError, ValueError) as error:
                    refuse(connection, str(error))
                    continue
                if not self._code.is_current():
                    request.close()
                    refuse(connection, "the code on disk has changed")
                    return None
                self._prepare(request)
                gc.freeze()
                try:
                    child = os.fork()
                except OSError as error:
                    request.close()
                    refuse(connection, f"fork: {error.strerror}")
                    continue
                if child == 0:
                    # The daemon's descriptors get numbers which these objects must not close again.
                    self._listener.detach()
                    for silent in self._silent.values():
                        silent.connection.detach()
                    return become_daemon_of(connection.detach(), request, self._cgroups)
                request.close()
        return None

    def _next_caller(self) -> _Caller | None:
        """The next caller with a request or an end; None when nobody has connected for the idle time.

        One that says nothing for WITHIN_S is refused, and delays no other.
        """
        poll = select.poll()
        for fd in (self._listener.fileno(), *self._silent):
            poll.register(fd, select.POLLIN)
        idle_until = time.monotonic() + self._idle_s
        while (now := time.monotonic()) < idle_until:
            while self._silent and (oldest := next(iter(self._silent.values()))).until <= now:
                poll.unregister(oldest.connection)
                del self._silent[oldest.connection.fileno()]
                with oldest.connection:
                    refuse(oldest.connection, f"the request did not come within {WITHIN_S:g} s")
            until = min([idle_until, *(each.until for each in self._silent.values())])
            ready = poll.poll(None if until == math.inf else max(0, math.ceil(1000 * (until - now))))
            for fd, _ in ready:
                if fd in self._silent:
                    return self._silent.pop(fd)
            if ready:
                idle_until = time.monotonic() + self._idle_s
                if (caller := self._accepted()) is not None:
                    self._silent[caller.connection.fileno()] = caller
                    poll.register(caller.connection, select.POLLIN)
        return None

    def _accepted(self) -> _Caller | None:
        """The process that has connected; None for one that is refused."""
        connection, _ = self._listener.accept()
        try:
            return _Caller(connection, checked_peer(connection, self._world), time.monotonic() + WITHIN_S)
        except (OSError, CallerDiffers) as error:
            with connection:
                refuse(connection, str(error))
            return None

    def close(self) -> None:
        """The address is free for a successor."""
        with suppress(FileNotFoundError):
            os.unlink(self._path)
        self._listener.close()


def _offer_for_merging() -> None:
    """The kernel may keep one copy of equal pages of this memory and the children's, where the node has that on.

    Children inherit it, programs that they execute do not: nothing of QEMU or a guest is offered. Raises OSError.
    Source: madvise(2), MADV_MERGEABLE; kernel Documentation/admin-guide/mm/ksm.rst (`/sys/kernel/mm/ksm/run`).
    """
    with open("/proc/self/maps") as file:
        for line in file:
            addresses, permissions, _, _, inode, *_ = line.split()
            if permissions == "rw-p" and inode == "0" and "[stack]" not in line:
                start, end = (int(address, 16) for address in addresses.split("-"))
                madvise(start, end - start, MADV_MERGEABLE)
