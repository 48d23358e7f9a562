"""Undoes the resources that a sandbox has left on the host, by its state, when no shim serves it any more.

`delete` does so in a process of its own, since `clean_sandbox` has no time limit, and imports this only when there is a
state. A new sandbox does so for the id that it takes, which no other running shim may have.
"""

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from msgspec.structs import replace

from pyshim.cleanup.background import Report, Reporter
from pyshim.cleanup.names import Places, belongs_to, containers_of, conventional_ledger
from pyshim.cleanup.remote_vms import are_stopped, hold_s, remote_vms
from pyshim.cleanup.sockets import remove_dead_socket
from pyshim.cleanup.undo import TIMEOUT_S, undo_entries
from pyshim.host.files import lock_within, open_directory
from pyshim.host.processes import identity as processes
from pyshim.model.errors import DeadlineExceeded, FailedPrecondition, NotFound, ShimError
from pyshim.model.ids import SandboxId
from pyshim.model.ledger import LedgerEntry
from pyshim.start.address import socket_name
from pyshim.state.schema import NotOurState, SandboxState, ShimRecord, StateDamaged
from pyshim.state.store import StateStore

EXIT_WAIT_S = 1.0
"""Seconds for a daemon to exit by itself, as it does at the normal end of every sandbox."""
TERM_WAIT_S = 1.0
"""Seconds for a daemon to obey SIGTERM, of the three for which `delete` is waited for."""
LOCK_WAIT_S = 10.0
"""Seconds for another process that cleans the same sandbox, and for one undo after it."""
UNDO_S = 30.0
"""Seconds for one entry when no caller waits: a process may write its core, or have much memory to give back."""
WATCH_PAUSE_S = 1.0
"""Seconds between two checks of a shim that ends its remote VM, which takes minutes."""
REST_S = 60.0
"""Seconds for a shim whose remote VM is gone to undo the rest and exit."""
REMAINS_TIMEOUT_S = 10.0
"""Seconds for the undo of what an earlier shim left, before a new sandbox of its id."""
_ONE_UNDO_S = 1.5
"""Seconds for one entry while a caller waits, so that one that hangs leaves time for the others."""
_SOCKET_NAME_CHARS = 64
"""Characters of the name of a shim's socket, a SHA-256 (`start/address.py`)."""


def clean_sandbox(
    sandbox_id: str,
    container_id: str,
    *,
    address: str,
    namespace: str,
    state_root: str,
    report: Reporter,
    register: str | None = None,
) -> None:
    """Everything of the sandbox that no shim serves is removed. For each thing that stays an error is reported.

    A sandbox of that name in another namespace, or of another containerd (`address` is the caller's), is another
    sandbox: the state's path has neither.
    With a living daemon nothing is touched, unless the container is the sandbox's own: then containerd has given up the
    whole sandbox, and a daemon that still has resources after a grace is ended first.
    """
    store = StateStore(root=state_root, register=register)
    remains = _Remains(store, sandbox_id, Places(), one_timeout_s=UNDO_S)
    with locked(store.directory(sandbox_id), time.monotonic() + LOCK_WAIT_S) as is_alone:
        try:
            left = _look(store, sandbox_id)
            if left.shim is not None and not _is_callers(left.shim, sandbox_id, address, namespace):
                return
            if container_id != sandbox_id and (left.ledger is None or left.is_served):
                return
            _end_daemon(left, lambda: _look(store, sandbox_id).has_resources)
            now = _look(store, sandbox_id)
            if now.ledger is None:
                if now.problem:
                    remains.undo_by_names(now.problem)
            elif left.shim is not None and left.is_served and (remote := remote_vms(left.ledger or ())):
                remains.wait_and_undo(left.shim, remote, report, alone=is_alone)
            else:
                with contextlib.suppress(NotFound):  # the shim has undone the rest meanwhile
                    remains.undo(report=report if is_alone else None)
        except NotOurState:
            pass  # Kata's own
        except ShimError as error:
            remains.errors.append(str(error))
        finally:
            for text in remains.errors:
                report(Report.ERROR, text)


class _Left(NamedTuple):
    """What the files of a sandbox say of it."""

    shim: ShimRecord | None
    """By the state, or by the register; None if neither has the sandbox."""
    ledger: tuple[LedgerEntry, ...] | None
    """None without a state that can be read."""
    problem: str = ""
    """Why there is none, if names have to do."""

    @property
    def has_resources(self) -> bool:
        # A daemon at its normal end removes its state first and its entry in the register right after.
        return bool(self.ledger) if self.ledger is not None else self.shim is not None

    @property
    def is_served(self) -> bool:
        return self.shim is not None and _is_served(self.shim)


def _look(store: StateStore, sandbox_id: str) -> _Left:
    """Raises StateTooNew, NotOurState."""
    try:
        state = store.load(sandbox_id)
    except (StateDamaged, NotFound) as error:
        shim = store.entered(sandbox_id)
        has_to_be_named = shim is not None or isinstance(error, StateDamaged)
        return _Left(shim, None, str(error) if has_to_be_named else "")
    return _Left(state.shim, state.ledger)


def refuse_running_namesake(store: StateStore, sandbox_id: SandboxId, ours: ShimRecord) -> None:
    """No other running shim has a sandbox of this id. Raises FailedPrecondition naming it; NotOurState, StateTooNew.

    Ids are unique in a namespace of containerd only, and Kata's directories are named by the id alone: a second sandbox
    would mount over the first one's share, and its end would remove the first one's directories.
    """
    try:
        theirs = store.load(sandbox_id).shim
    except (NotFound, StateDamaged):
        entered = store.entered(sandbox_id)
        if entered is None:
            return
        theirs = entered
    if _process(theirs) != _process(ours) and _is_served(theirs):
        raise FailedPrecondition(
            f"create sandbox {sandbox_id!r}: the shim of pid {theirs.pid} in namespace {theirs.namespace!r} has one"
        )


def clear_remains(store: StateStore, sandbox_id: SandboxId) -> None:
    """What a dead shim left of a sandbox of this id is undone, before its only record is overwritten.

    Blocks. Raises FailedPrecondition naming what cannot be undone: the new sandbox's record would not list it.
    """
    errors = undo_remains(store, sandbox_id, deadline=time.monotonic() + REMAINS_TIMEOUT_S)
    if errors:
        raise FailedPrecondition(
            f"create sandbox {sandbox_id!r}: an earlier shim left what cannot be undone: {'; '.join(errors)} "
            f"(hint: 'pyshim cleanup {sandbox_id}' tries again)"
        )


def undo_remains(store: StateStore, sandbox_id: str, *, deadline: float) -> list[str]:
    """Errors for what could not be undone of a sandbox whose shim is gone; else nothing of it is left, nor its state.

    Raises StateTooNew, NotOurState.
    """
    remains = _Remains(store, sandbox_id, Places(), one_timeout_s=_ONE_UNDO_S, deadline=deadline)
    with locked(store.directory(sandbox_id), deadline):
        try:
            remains.undo(is_gone=True)
        except (StateDamaged, NotFound) as error:
            remains.undo_by_names(str(error))
    return remains.errors


def _is_callers(shim: ShimRecord, sandbox_id: str, address: str, namespace: str) -> bool:
    """The shim's socket is the one `start` claimed for this containerd, namespace and sandbox."""
    if shim.namespace != namespace:
        return False
    claimed = os.path.basename(shim.socket)
    if not address or len(claimed) != _SOCKET_NAME_CHARS:
        return True
    return claimed == socket_name(address, namespace, sandbox_id)


@contextlib.contextmanager
def locked(directory: str, deadline: float) -> Iterator[bool]:
    """The lock on a sandbox's state; False when it cannot be had until `deadline`, less the time of one undo: cleaning
    twice is harmless.

    A pod whose shim dies gets one `delete` per container at the same moment.
    """
    try:
        lock = open_directory(directory)
    except OSError:
        yield False
        return
    with lock:
        try:
            is_alone = lock_within(lock, deadline - _ONE_UNDO_S - time.monotonic())
        except OSError:  # such as ENOLCK
            is_alone = False
        yield is_alone


def _process(shim: ShimRecord) -> processes.ProcessRef:
    return processes.ProcessRef(shim.pid, shim.start_ticks)


def _is_served(shim: ShimRecord) -> bool:
    return processes.is_alive(_process(shim))


def _end_daemon(left: _Left, has_resources: Callable[[], bool]) -> None:
    """The daemon has ended, or has no resources any more; one whose remote VM runs has been asked to end.

    At the normal end it has stopped the VM already and exits by itself; where other containers' tasks are still to be
    deleted it lives on, without resources, and is left alone.
    """
    # Checked first: pidfd_open raises for a number that cannot be a pid.
    if left.shim is None or not left.is_served or not _can_be_shim(left.shim):
        return
    with contextlib.suppress(ProcessLookupError), processes.opened(_process(left.shim)) as fd:
        if _gone_within(fd, EXIT_WAIT_S):
            return
        if not has_resources():
            return
        ways = ((signal.SIGTERM, TERM_WAIT_S), (signal.SIGKILL, UNDO_S))
        may_kill = are_stopped(remote_vms(left.ledger or ()))
        for signal_number, wait_s in ways if may_kill else ways[:1]:
            signal.pidfd_send_signal(fd, signal_number)
            if _gone_within(fd, wait_s):
                return


def _can_be_shim(shim: ShimRecord) -> bool:
    """The process is of our user and pid namespace, and a Python program, as every shim of ours is."""
    process = _process(shim)
    return (
        shim.pid_namespace in (0, processes.our_pid_namespace())
        and processes.is_in_our_namespace(process)
        and processes.is_of_user(process, os.getuid())
        and os.path.basename(processes.executable(process)).startswith("python")
    )


def _wait_or_kill(store: StateStore, sandbox_id: str, shim: ShimRecord, busy_s: float) -> None:
    """The shim has ended: by itself, or killed after `busy_s`, or soon after its VM was stopped."""
    daemon = _process(shim)
    until = time.monotonic() + busy_s
    with contextlib.suppress(ProcessLookupError), processes.opened(daemon) as fd:
        while not _gone_within(fd, WATCH_PAUSE_S) and (now := time.monotonic()) < until:
            with contextlib.suppress(ShimError):  # NotFound: it has undone everything and only has to exit
                if not are_stopped(remote_vms(store.load(sandbox_id).ledger)):
                    continue
            until = min(until, now + REST_S)
        # A process that is stuck in the kernel ends later without running again.
        with contextlib.suppress(DeadlineExceeded):
            if _can_be_shim(shim):
                processes.kill(daemon, time.monotonic() + TIMEOUT_S)


def _gone_within(pidfd: int, wait_s: float) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(max(0.0, wait_s) * 1000))


class _Remains:
    """A sandbox's resources on the host: found by its ledger, or by its names where that cannot be read."""

    def __init__(
        self,
        store: StateStore,
        sandbox_id: str,
        places: Places,
        *,
        one_timeout_s: float,
        deadline: float = float("inf"),
    ) -> None:
        """One entry may take `one_timeout_s`, all of them until `deadline`; remote VMs take as long as they take."""
        self._store = store
        self._sandbox_id = sandbox_id
        self._places = places
        self._one_timeout_s = one_timeout_s
        self._deadline = deadline
        self.errors: list[str] = []

    def undo(self, *, is_gone: bool = False, report: Reporter | None = None) -> None:
        """The ledger on disk is undone from its end; entries that could not be undone stay, for the next attempt.

        Remote VMs are ended with a `report` only, whose caller waits for it. `is_gone`: no shim serves any more.
        """
        state = self._store.load(self._sandbox_id)
        remote = remote_vms(state.ledger)
        if remote and report is None and not is_gone:
            return  # another process has the lock, most likely the one that waits for their end
        local = tuple(entry for entry in state.ledger if entry not in remote)
        left = self._release(local)
        if left != local or not remote:
            self._save(replace(state, ledger=(*left, *remote)), is_gone)
        if remote and report is not None:
            while self.errors:
                report(Report.ERROR, self.errors.pop(0))
            report(Report.LONG, f"remote vm '{remote[0].key}': process {os.getpid()} waits for its end")
            if not self._release(remote):
                self._save(replace(state, ledger=left), is_gone)
        elif remote:
            self.errors += [f"release remote-vm {entry.key!r}: its end may take minutes" for entry in remote]

    def wait_and_undo(
        self, shim: ShimRecord, remote: tuple[LedgerEntry, ...], report: Reporter, *, alone: bool
    ) -> None:
        """A shim that was asked to end its VM has done so, or both were ended because it never would."""
        if not alone:  # another process has the lock, most likely one that waits already
            report(Report.NOTE, f"remote vm '{remote[0].key}': shim {shim.pid} waits for its end")
            return
        report(Report.LONG, f"remote vm '{remote[0].key}': process {os.getpid()} waits for shim {shim.pid} to end it")
        _wait_or_kill(self._store, self._sandbox_id, shim, max(map(hold_s, remote)))
        with contextlib.suppress(NotFound):  # the shim has come to its end
            state = self._store.load(self._sandbox_id)
            self._deadline = time.monotonic() + TIMEOUT_S * len(state.ledger)
            self._one_timeout_s = TIMEOUT_S
            self._save(replace(state, ledger=self._release(state.ledger)), is_gone=True)

    def undo_by_names(self, reason: str) -> None:
        """As `undo`, for a state that cannot be read. It is removed last, so that a failure leaves a trace."""
        errors: list[str] = []
        try:
            if not self._release(conventional_ledger(self._sandbox_id, self._places), errors):
                self._store.remove(self._sandbox_id)
        except OSError as error:
            errors.append(f"look for remains: {error.strerror} ({error.filename})")
        except ShimError as error:
            errors.append(str(error))
        self.errors += [f"clean sandbox {self._sandbox_id!r} ({reason}): {error}" for error in errors]

    def _release(self, ledger: tuple[LedgerEntry, ...], errors: list[str] | None = None) -> tuple[LedgerEntry, ...]:
        return undo_entries(
            ledger,
            deadline=self._deadline,
            one_timeout_s=self._one_timeout_s,
            errors=self.errors if errors is None else errors,
            check=self._check(),
        )

    def _check(self) -> Callable[[LedgerEntry], None]:
        state = None
        with contextlib.suppress(ShimError):
            state = self._store.load(self._sandbox_id)
        containers = containers_of(self._sandbox_id, self._places, state)
        return belongs_to(self._sandbox_id, self._places, self._store.root, container_ids=containers)

    def _save(self, state: SandboxState, is_gone: bool) -> None:
        """The state has the entries that are left; without any it is gone, unless its shim still serves."""
        if state.ledger:
            self._store.save(state)
        elif is_gone or not _is_served(state.shim):
            remove_dead_socket(state.shim.socket)
            self._store.remove(self._sandbox_id)
