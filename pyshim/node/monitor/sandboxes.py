"""The sandboxes of this node, found by the directories of their states; inotify reports changes."""

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import suppress

from inotify_simple import INotify, flags

from pyshim.model.observation import MONITOR_SOCKET

log = logging.getLogger(__name__)

_EVENTS = flags.CREATE | flags.DELETE | flags.MOVED_TO | flags.MOVED_FROM


class Sandboxes:
    """Of the directories `roots`, which need not be there: each holds one directory for each sandbox.

    `on_change` is called after sandboxes came or went; it must not block.
    """

    def __init__(self, roots: tuple[str, ...], on_change: Callable[[], None]) -> None:
        self._roots = roots
        self._on_change = on_change
        self._inotify: INotify | None = None

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
        self._inotify = INotify(nonblocking=True)
        asyncio.get_running_loop().add_reader(self._inotify.fileno(), self._noticed)
        self._watch_roots()

    def close(self) -> None:
        """Idempotent."""
        if self._inotify is not None:
            asyncio.get_running_loop().remove_reader(self._inotify.fileno())
            self._inotify.close()
            self._inotify = None

    def _watch_roots(self) -> None:
        """Each root is watched, or the next directory above it that is there. Repeating it adds nothing."""
        assert self._inotify is not None
        for root in self._roots:
            while not os.path.isdir(root):
                root = os.path.dirname(root)
            self._inotify.add_watch(root, _EVENTS)

    def _noticed(self) -> None:
        if self._inotify is not None:
            self._inotify.read(timeout=0)
            try:
                self._watch_roots()
            except OSError as error:
                log.warning("watch sandboxes", extra={"error": str(error)})
            self._on_change()
