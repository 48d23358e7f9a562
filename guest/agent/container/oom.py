"""Noticing the OOM killer: `memory.events` of a container's cgroup changes and can be polled."""

from __future__ import annotations

import os
import select

TYPE_CHECKING = False
if TYPE_CHECKING:
    from guest.agent.agent import Agent
    from guest.agent.container.container import Container


def watch_oom(agent: Agent, container: Container) -> None:
    """Each time the OOM killer takes processes of the container gives one OOM event, until init ends.

    Source: kernel Documentation/admin-guide/cgroup-v2.rst, memory.events: a change generates a file modified event.
    """
    try:
        fd = os.open(f"{container.cgroup}/memory.events", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return  # the memory controller is off
    seen = _oom_kills(fd)

    def look(_events: int = 0) -> None:
        nonlocal seen
        if fd >= 0:
            now = _oom_kills(fd)
            for _ in range(min(now - seen, 1)):
                agent.oom_events.add(container.cid)
            seen = now

    def end() -> None:
        nonlocal fd
        look()  # the kill that ended init may not have been noticed yet
        agent.loop.unwatch(fd)
        os.close(fd)
        fd = -1

    # Kernel files report a change as POLLPRI and POLLERR until read again: edge-triggered, once per change.
    agent.loop.watch(fd, select.EPOLLPRI | select.EPOLLET, look)
    container.init.exited.when_done(end)


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
