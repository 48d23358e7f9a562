"""Which CPUs the sandboxes of this node pin, by what their states say; one shim at a time decides."""

import errno
import fcntl
import os
import time
from collections.abc import Mapping

from pyshim.model.errors import DeadlineExceeded, FailedPrecondition, ShimError
from pyshim.state.store import ROOT, StateStore

_WAIT_S = 5.0
_PAUSE_S = 0.01


class PinnedElsewhere:
    """Held from the look at other sandboxes until our own state is on disk; `taken` is the sandbox of each CPU."""

    def __init__(self, lock_fd: int, taken: Mapping[int, str]) -> None:
        self._lock_fd = lock_fd
        self.taken = taken

    def __enter__(self) -> "PinnedElsewhere":
        return self

    def __exit__(self, *_error: object) -> None:
        os.close(self._lock_fd)


def pinned_elsewhere(sandbox_id: str, root: str = ROOT) -> PinnedElsewhere:
    """The CPUs all other sandboxes pin. Blocks for a moment. Raises DeadlineExceeded, FailedPrecondition."""
    try:
        fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise FailedPrecondition(f"lock '{root}': {error.strerror}") from error
    try:
        _lock(fd, root)
        taken: dict[int, str] = {}
        store = StateStore(root=root)
        for other in store.sandbox_ids():
            if other != sandbox_id:
                taken.update(dict.fromkeys(_pins_of(store, other), other))
        return PinnedElsewhere(fd, taken)
    except BaseException:
        os.close(fd)
        raise


def _lock(fd: int, root: str) -> None:
    deadline = time.monotonic() + _WAIT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno != errno.EWOULDBLOCK or time.monotonic() > deadline:
                raise DeadlineExceeded(f"lock '{root}': another shim decides about CPUs for too long") from error
            time.sleep(_PAUSE_S)
        else:
            return


def _pins_of(store: StateStore, sandbox_id: str) -> tuple[int, ...]:
    """Empty where its state cannot be read or is another runtime's: nothing is known to be pinned there."""
    try:
        snapshot = store.load(sandbox_id).snapshot
    except ShimError:
        return ()
    pinned = snapshot.cgroups.get("Pinned") if snapshot is not None else None
    return tuple(cpu for cpu in pinned.values() if isinstance(cpu, int)) if isinstance(pinned, Mapping) else ()
