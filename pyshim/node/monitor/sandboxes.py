"""The sandboxes of this node, found by the directories of their states; inotify reports changes."""

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import suppress

from pyshim.host.syscalls import (
    IN_CREATE,
    IN_DELETE,
    IN_MOVED_FROM,
    IN_MOVED_TO,
    inotify_add_watch,
    inotify_drain,
    inotify_init,
)
from pyshim.model.observation import MONITOR_SOCKET

log = logging.getLogger(__name__)

_EVENTS = IN_CREATE | IN_DELETE | IN_MOVED_TO | IN_MOVED_FROM


class Sandboxes:
    """Of the directories `roots`, which need not be there: each holds one directory for each sandbox.

    `on_change` is called after sandboxes came or went; it must not block.
    """

    def __init__(self, roots: tuple[str, ...], on_change: Callable[[], None]) -> None:
        self._roots = roots
        self._on_change = on_change
        self._inotify_fd: int | None = None

    def sockets(self) -> dict[str, str]:
        """The monitor socket of each sandbox that has one."""
        found: dict[str, str] = {}
        for root in self._roots:
            with suppress(OSError), os.scandir(root) as entries:
                for entry in entries:
                    path = f"{entry.path}/{MONITOR_SOCKET}"
                    if entry.name not in found and os.path.exists(path):
                        found[entry.name] = path
        return dict(sorted(found.items()))

    def watch(self) -> None:
        """Changes are noticed from now on. Raises OSError, of which the kernel's limit of watches is the usual one."""
        self._inotify_fd = inotify_init()
        asyncio.get_running_loop().add_reader(self._inotify_fd, self._noticed)
        self._watch_roots()

    def close(self) -> None:
        """Idempotent."""
        if self._inotify_fd is not None:
            asyncio.get_running_loop().remove_reader(self._inotify_fd)
            os.close(self._inotify_fd)
            self._inotify_fd = None

    def _watch_roots(self) -> None:
        """Each root is watched, or the next directory above it that is there. Repeating it adds nothing."""
        assert self._inotify_fd is not None
        for root in self._roots:
            while not os.path.isdir(root):
                root = os.path.dirname(root)
            inotify_add_watch(self._inotify_fd, root, _EVENTS)

    def _noticed(self) -> None:
        if self._inotify_fd is not None:
            inotify_drain(self._inotify_fd)
            try:
                self._watch_roots()
            except OSError as error:
                log.warning("watch sandboxes", extra={"error": str(error)})
            self._on_change()
