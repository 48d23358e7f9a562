"""The server: it forks, and sees to it that a fork is always waiting."""

import fcntl
import gc
import importlib
import os
import select
import signal
import socket
import time
from array import array
from contextlib import suppress
from typing import Any

from pyshim.bootstrap import zygote as link
from pyshim.bootstrap.daemonize import raise_oom_score
from pyshim.host.memory.advice import give_back_free, keep_small_pages, offer_for_merging
from pyshim.host.memory.baseline import Baseline, NotAlone, take_baseline
from pyshim.host.memory.mappings import as_runs
from pyshim.host.processes.caller import Cgroups, World, world_of
from pyshim.later import LATER
from pyshim.zygote.code import code_stamp, require_settled
from pyshim.zygote.fork import QUIET_MS, RECEIVE_BYTES, STALE, TAKEN, Daemon, Waiting, say

_LOST_AT_MOST = 10
"""Forks in a row that end before anybody has asked for them: what loses them will not get better."""
_THREADS_GONE_WITHIN_S = 10.0
_RUN_BYTES = 16  # of a run of pages: its start and its end
# What a shim uses: those after the first one it imports itself only when it comes to it.
SHIM_MODULES = (
    "pyshim.serve",
    *LATER,
    "pyshim.zygote.rest",
    *("concurrent.futures.thread", "encodings.ascii", "google.protobuf.descriptor_pb2", "queue"),
    *("pyshim.host.cgroups.sandbox_cgroups", "pyshim.host.sources"),
)


def run(*, directory: str, idle_s: float, modules: tuple[str, ...] | None = None) -> Daemon | None:
    """None in the zygote when it has ended: idle for `idle_s` (0: never), told to, or replaced by newer code.

    In every process that it forks this returns as well, with what that process shall do. A second zygote for the same
    address ends at once. Raises OSError when it cannot listen.
    """
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.chdir("/")
    os.makedirs(directory, mode=0o700, exist_ok=True)
    if os.stat(directory).st_uid != os.geteuid():
        raise PermissionError(f"listen in {directory!r}: it is another user's")
    path = link.address(directory)
    lock_fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("another zygote serves here already")
        return None
    gc.disable()
    for name in SHIM_MODULES if modules is None else modules:
        importlib.import_module(name)
    if modules is None:
        _rehearse(directory)
    zygote = _Zygote(path)
    baseline = _baseline()
    if baseline is not None and modules is None:
        zygote.likely = _written_by_a_pod(directory, baseline)
        with suppress(NotAlone, OSError):  # this process is larger by what the look has written to
            baseline.give_back()
    for advise in (keep_small_pages, offer_for_merging):
        with suppress(OSError):  # a kernel built without it: forks are right, only larger
            advise()
    daemon = zygote.run(idle_s)
    return None if daemon is None else daemon._replace(baseline=baseline)


def _baseline() -> Baseline | None:
    """What forks can go back to, of which this process itself has nothing in memory; None where there is no such."""
    try:
        baseline = take_baseline()
        baseline.give_back()
        return baseline
    except Exception as error:  # forks are right without it, only larger
        say(f"no baseline: {type(error).__name__}: {error}")
    gc.collect()
    gc.freeze()
    give_back_free()
    return None


def _written_by_a_pod(directory: str, baseline: Baseline) -> "array[int]":
    """Start and end, in turn, of each run of pages that a fork writes to from a Create to the end of its Start.

    Nothing when that cannot be found out.
    """
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        with suppress(BaseException), open(write_end, "wb") as answer:
            marks: list[set[int]] = []
            _rehearse(directory, plays=1, mark=lambda: marks.append(baseline.own()))
            before, after = marks
            array("Q", as_runs(after - before)).tofile(answer)
        os._exit(0)
    os.close(write_end)
    with open(read_end, "rb") as answer:
        found = answer.read()
    os.waitpid(child, 0)
    return array("Q", found[: len(found) // _RUN_BYTES * _RUN_BYTES])  # less than whole if it was killed


def _rehearse(directory: str, **options: Any) -> None:
    from pyshim.rehearsal import rehearse

    try:
        rehearse(directory, **options)
    except Exception as error:  # forks are right without it, only larger
        say(f"rehearsal failed: {type(error).__name__}: {error}")
    # A thread that was joined is the kernel's for a moment longer.
    until = time.monotonic() + _THREADS_GONE_WITHIN_S
    while len(os.listdir("/proc/self/task")) != 1:
        if time.monotonic() > until:
            raise OSError("rehearse: a thread is left, and a process with threads must not fork")
        time.sleep(0.001)


class _Zygote:
    def __init__(self, path: str) -> None:
        self._path = path
        self._world: World = world_of("self")
        self._cgroups = Cgroups()
        self._last_groups = ""
        """Where the last caller was."""
        self.likely = array("Q")
        """Start and end, in turn, of each run of pages that a fork makes its own beforehand."""
        self._code = code_stamp()
        require_settled(self._code)
        with suppress(FileNotFoundError):
            os.unlink(path)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        before = os.umask(0o177)
        self._listener.bind(path)
        os.umask(before)
        self._listener.listen(128)
        self._listener.setblocking(False)
        self._waker, self._wakened = socket.socketpair()
        self._waker.setblocking(False)
        self._stop = False

    def run(self, idle_s: float) -> Daemon | None:
        raise_oom_score()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
        signal.set_wakeup_fd(self._waker.fileno())
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        say("ready")
        lost = 0
        while not self._stop and lost < _LOST_AT_MOST:
            here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                child = os.fork()
            except OSError as error:
                say(f"fork: {error.strerror}")
                break
            if child == 0:
                return self._fork(there, here)
            there.close()
            with here:
                lost = 0 if self._attend(here, idle_s) else lost + 1
        with suppress(FileNotFoundError):
            os.unlink(self._path)
        say("ended")
        return None

    def _fork(self, zygote: socket.socket, *others: socket.socket) -> Daemon:
        """In the child, which never returns to the work of the zygote."""
        for sock in (self._waker, self._wakened, *others):
            sock.close()
        waiting = Waiting(
            listener=self._listener,
            zygote=zygote,
            world=self._world,
            code=self._code,
            cgroups=self._cgroups,
            groups=self._last_groups,
            likely=self.likely,
        )
        return waiting.wait()

    def _attend(self, fork: socket.socket, idle_s: float) -> bool:
        """Whether the fork that waits has found its caller; it is gone otherwise, or shall go: `_stop` is then set."""
        ready = self._first_of(fork, idle_s * 1000 if idle_s else None)
        if fork.fileno() not in ready:
            self._stop = True
            return False
        word = fork.recv(RECEIVE_BYTES)
        if word == STALE:
            self._stop = True
        if not word.startswith(TAKEN):
            return False
        self._last_groups = os.fsdecode(word.removeprefix(TAKEN))
        # Not yet the next one: its making would take a CPU from this one and its caller. Unless another waits already.
        self._first_of(self._listener, QUIET_MS)
        return True

    def _first_of(self, awaited: socket.socket, within_ms: float | None) -> list[int]:
        """What can be read first: of `awaited`, or of what a signal wakes us by; nothing in time."""
        poll = select.poll()
        for each in (awaited, self._wakened):
            poll.register(each, select.POLLIN)
        return [fd for fd, _ in poll.poll(within_ms)]

    def _on_signal(self, number: int, frame: object) -> None:
        self._stop = True
