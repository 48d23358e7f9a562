"""The ends of processes that are not children of this process."""

import asyncio
import contextlib
import os
from collections.abc import Callable

from pyshim.host.processes.identity import ProcessRef, opened


class Ends:
    """Calls back once for each watched process that ends; a pidfd each. Made in a running loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._fds: set[int] = set()

    def watch(self, process: ProcessRef, when_ended: Callable[[], None]) -> None:
        """`when_ended` is called when that very process ends, or at the loop's next turn if it has ended."""
        try:
            with opened(process) as pidfd:
                fd = os.dup(pidfd)
        except ProcessLookupError:
            self._loop.call_soon(when_ended)
            return

        def ended() -> None:
            self._forget(fd)
            when_ended()

        self._fds.add(fd)
        self._loop.add_reader(fd, ended)

    def close(self) -> None:
        """Watches end. Idempotent."""
        for fd in tuple(self._fds):
            self._forget(fd)

    def _forget(self, fd: int) -> None:
        self._fds.discard(fd)
        self._loop.remove_reader(fd)
        with contextlib.suppress(OSError):
            os.close(fd)
