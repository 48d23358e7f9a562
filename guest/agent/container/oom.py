"""OOM events, from `memory.events` of the containers' cgroups."""

from __future__ import annotations

import asyncio
import os
import select

from guest.agent.container.container import Container
from guest.agent.errors import Unavailable
from guest.agent.streams import EdgeEvents

# If no shim asks, the oldest events are dropped.
_MAX_EVENTS = 100


class OomEvents:
    """Ids of containers that lost a process to the OOM killer."""

    def __init__(self) -> None:
        self._events: list[str] = []
        self._news = asyncio.Event()
        self._is_over = False

    async def next(self) -> str:
        """The oldest event that no earlier call returned, once there is one. Unavailable if the sandbox ends."""
        while not self._events:
            if self._is_over:
                raise Unavailable("get OOM event: the sandbox is destroyed")
            self._news.clear()
            await self._news.wait()
        return self._events.pop(0)

    def add(self, container_id: str) -> None:
        self._events.append(container_id)
        del self._events[:-_MAX_EVENTS]
        self._news.set()

    def end(self) -> None:
        """Calls that wait for an event end."""
        self._is_over = True
        self._news.set()

    def watch(self, container: Container) -> None:
        """Until init ends, each kill of processes of the container by the OOM killer is one event.

        Source: kernel Documentation/admin-guide/cgroup-v2.rst, memory.events: a change generates a file modified event.
        """
        try:
            fd = os.open(f"{container.cgroup}/memory.events", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return  # the memory controller is off
        seen = _oom_kills(fd)

        def look() -> None:
            nonlocal seen
            now = _oom_kills(fd)
            if now > seen:
                self.add(container.cid)
            seen = now

        # Kernel files report a change as POLLPRI and POLLERR until read again.
        news = EdgeEvents(fd, select.EPOLLPRI, look)

        def end(_code: int) -> None:
            look()  # the kill that ended init may not have been noticed yet
            news.close()
            os.close(fd)

        container.init.child.when_ended(end)


def _oom_kills(fd: int) -> int:
    try:
        text = os.pread(fd, 4096, 0).decode("ascii", "replace")
    except OSError:
        return 0  # the cgroup is being removed
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key == "oom_kill" and value.isdigit():
            return int(value)
    return 0
