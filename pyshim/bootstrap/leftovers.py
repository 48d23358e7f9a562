"""What a sandbox may have left on the host, by its state: who still serves it, and undoing what nobody does.

Part of `delete`; imported only when there is a state at all.
"""

import contextlib
import fcntl
import os
import select
import signal
import time

from pyshim.bootstrap.dead_socket import remove_dead_socket
from pyshim.host import processes
from pyshim.host.mount_table import unmount_below
from pyshim.host.release import release
from pyshim.host.trees import remove_tree
from pyshim.model.errors import NotFound, ShimError
from pyshim.model.ledger import LedgerEntry
from pyshim.model.snapshot import ContainerSnapshot
from pyshim.state.json_fields import StateDamaged
from pyshim.state.schema import NotOurState, SandboxState
from pyshim.state.store import StateStore

EXIT_WAIT_S = 1.0
"""For a daemon that is on its way out, as it is at the normal end of every sandbox."""
TERM_WAIT_S = 1.0
_ONE_UNDO_S = 1.5
_LOCK_PAUSE_S = 0.02

# The places of plan/share.py and plan/sandbox.py, for a state that cannot be read; a test compares them.
SHARED_ROOT = "/run/kata-containers/shared/sandboxes"
VM_ROOT = "/run/vc/vm"


def clean(
    sandbox_id: str, container_id: str, *, namespace: str, state_root: str, deadline: float, errors: "list[str]"
) -> "tuple[int, ContainerSnapshot | None]":
    """What nobody serves of the sandbox is gone, except for what `errors` then says. Returns pid and record, if known.

    A sandbox of that name in another of containerd's namespaces is another sandbox: the state's path has no namespace.
    With a living daemon nothing is touched, unless the container is the sandbox's own: then containerd has given up the
    whole sandbox, and a daemon that still holds resources after a grace is ended first.
    """
    store = StateStore(root=state_root)
    lock_fd = _locked(store.directory(sandbox_id), deadline)
    pid, container = 0, None
    try:
        state = store.load(sandbox_id)
        if state.shim.namespace != namespace:
            return pid, container
        pid, container = _known(state, container_id)
        if _is_served(state) and container_id != sandbox_id:
            return pid, container
        _end_daemon(store, state, deadline)
        _undo_all(store, sandbox_id, deadline, errors)
    except StateDamaged as error:
        if container_id == sandbox_id:
            errors.extend(_clean_by_convention(store, sandbox_id, str(error), deadline))
    except (NotFound, NotOurState):
        # The daemon or another `delete` was faster; or the state is Kata's own, with which we have nothing to do.
        pass
    except ShimError as error:
        errors.append(str(error))
    finally:
        if lock_fd >= 0:
            os.close(lock_fd)
    return pid, container


def _locked(directory: str, deadline: float) -> int:
    """An fd that holds the lock on the sandbox's state; -1 when it could not be had: cleaning twice is harmless.

    A pod whose shim dies gets one `delete` per container at the same moment.
    """
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return -1
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except OSError:
            if time.monotonic() >= deadline - _ONE_UNDO_S:
                os.close(fd)
                return -1
            time.sleep(_LOCK_PAUSE_S)


def _known(state: SandboxState, container_id: str) -> "tuple[int, ContainerSnapshot | None]":
    if state.snapshot is None:
        return 0, None
    containers = {str(container.container_id): container for container in state.snapshot.containers}
    return state.snapshot.vmm_pid, containers.get(container_id)


def _daemon(state: SandboxState) -> processes.ProcessRef:
    return processes.ProcessRef(state.shim.pid, state.shim.start_ticks)


def _is_served(state: SandboxState) -> bool:
    return processes.is_alive(_daemon(state))


def _end_daemon(store: StateStore, state: SandboxState, deadline: float) -> None:
    """The daemon has ended, or holds nothing any more.

    At the normal end it has stopped the VM already and exits by itself; where other containers' tasks are still to be
    deleted it lives on, without resources, and is left alone.
    """
    daemon = _daemon(state)
    try:
        fd = os.pidfd_open(daemon.pid)
    except ProcessLookupError:
        return
    try:
        if not processes.is_alive(daemon) or _gone_within(fd, EXIT_WAIT_S):
            return
        if not store.load(state.sandbox_id).ledger:
            return
        for signal_number, wait_s in ((signal.SIGTERM, TERM_WAIT_S), (signal.SIGKILL, deadline - time.monotonic())):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal_number)
            if _gone_within(fd, wait_s):
                return
    finally:
        os.close(fd)


def _gone_within(pidfd: int, wait_s: float) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(max(0.0, wait_s) * 1000))


def _undo_all(store: StateStore, sandbox_id: str, deadline: float, errors: "list[str]") -> None:
    """The ledger, as it now is on disk, is undone from its end; what could not be stays there, for the next to try."""
    state = store.load(sandbox_id)
    held = _undo(state.ledger, deadline, errors)
    if held:
        store.save(SandboxState(sandbox_id=state.sandbox_id, shim=state.shim, snapshot=state.snapshot, ledger=held))
    elif not _is_served(state):
        scheme, _, path = state.shim.socket.partition("://")
        if scheme == "unix" and path.startswith("/"):
            remove_dead_socket(path)
        store.remove(sandbox_id)


def _undo(ledger: "tuple[LedgerEntry, ...]", deadline: float, errors: "list[str]") -> "tuple[LedgerEntry, ...]":
    """The entries that could not be undone, in their order."""
    held: list[LedgerEntry] = []
    for entry in reversed(ledger):
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            errors.append(f"release {entry.kind.value} {entry.key!r}: no time left")
            held.append(entry)
            continue
        try:
            release(entry, timeout_s=min(left_s, _ONE_UNDO_S))
        except ShimError as error:
            errors.append(str(error))
            held.append(entry)
    return tuple(reversed(held))


def _clean_by_convention(store: StateStore, sandbox_id: str, reason: str, deadline: float) -> "list[str]":
    """What could not be cleaned of a sandbox whose state cannot be read, going by the names of its directories.

    Its daemon cannot be asked for, so processes with the VM's directory in their command line decide: those are its VMM
    and its virtiofsd. The damaged state goes last, so that failing leaves a trace.
    """
    errors = []
    vm_dir, shared_dir = f"{VM_ROOT}/{sandbox_id}", f"{SHARED_ROOT}/{sandbox_id}"
    try:
        for process in processes.find_by_argument(f"{vm_dir}/"):
            processes.kill(process, min(deadline, time.monotonic() + _ONE_UNDO_S))
        unmount_below(shared_dir)
        remove_tree(shared_dir)
        remove_tree(vm_dir)
        store.remove(sandbox_id)
    except OSError as error:
        errors.append(f"clean sandbox {sandbox_id!r} ({reason}): {error.strerror} ({error.filename})")
    except ShimError as error:
        errors.append(f"clean sandbox {sandbox_id!r} ({reason}): {error}")
    return errors
