"""The few names needed from `signal`, without the enum machinery that the package drags in."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

SIGCHLD: int = _signal.SIGCHLD
SIGKILL: int = _signal.SIGKILL
SIGPIPE: int = _signal.SIGPIPE
SIGTERM: int = _signal.SIGTERM
SIGXFSZ: int = _signal.SIGXFSZ


def wake_on_children(fd: int) -> None:
    """The end of a child writes a byte to the non-blocking `fd`."""
    _signal.set_wakeup_fd(fd)
    _signal.signal(SIGCHLD, lambda _number, _frame: None)


def block_and_wait_for_children(reap: Callable[[], None]) -> None:
    """`reap` runs now and after every child's end, for ever."""
    _signal.set_wakeup_fd(-1)
    # Blocked before the first look, so that no end falls between looking and waiting.
    _signal.pthread_sigmask(_signal.SIG_BLOCK, [SIGCHLD])
    while True:
        reap()
        _signal.sigwait([SIGCHLD])
