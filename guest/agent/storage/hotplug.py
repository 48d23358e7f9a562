"""Devices appear: loads drivers, and waits for what the host plugs in.

A wait looks at sysfs, and again whenever the kernel announces a device. A device that appeared before the first look is
not missed, since the state counts, not the announcements.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import suppress

from guest.agent.children import Child, Children
from guest.agent.errors import DeadlineExceeded
from guest.agent.files import read_text

_NETLINK_KOBJECT_UEVENT = 15  # linux/netlink.h
_KERNEL_GROUP = 1
# Seconds between two looks without news: a driver may bind without announcing it.
_LOOK_AGAIN_S = 0.1


class Hotplug:
    """Devices that the host plugs in. Each has `timeout_s` to appear."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    async def wait_for(self, what: str, look: Callable[[], str | None]) -> str:
        """The first result of `look` that is not None. DeadlineExceeded after the timeout names `what`.

        `look` runs at once, after every announcement of the kernel, and ten times a second.
        """
        found = look()
        if found is not None:
            return found
        loop = asyncio.get_running_loop()
        news = asyncio.Event()
        kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        with socket.socket(socket.AF_NETLINK, kind, _NETLINK_KOBJECT_UEVENT) as listener:
            listener.bind((0, _KERNEL_GROUP))
            loop.add_reader(listener, _heard, listener, news)
            try:
                async with asyncio.timeout(self._timeout_s):
                    while (found := look()) is None:
                        news.clear()
                        with suppress(TimeoutError):
                            async with asyncio.timeout(_LOOK_AGAIN_S):
                                await news.wait()
                    return found
            except TimeoutError:
                raise DeadlineExceeded(f"wait for {what}: not there after {self._timeout_s:g} s") from None
            finally:
                loop.remove_reader(listener)


def _heard(listener: socket.socket, news: asyncio.Event) -> None:
    # EAGAIN: all were read. ENOBUFS: some were lost, which does not matter, since the next look finds every device.
    with suppress(OSError):
        while listener.recv(65536):
            pass
    news.set()


# -- drivers of devices that no program opens by name, and file systems that every pod mounts --------------------------

LISTED = "/usr/lib/agent/drivers"
"""The names of kernel modules, in order of urgency. Only our own image has the file."""
NICENESS = 10
"""Calls of the host get nine tenths of a busy CPU. Not 19: a container that keeps the only CPU busy would leave that a
hundredth, and a disk or NIC that is plugged then would wait for its driver for many seconds."""


def load_drivers(children: Children, *, listed: str = LISTED, modprobe: str = "/sbin/modprobe") -> Child | None:
    """`modprobe` runs with the modules of the file `listed`, at NICENESS. None if there is no such file.

    Under emulation, loading takes 0.3 s of the guest's only CPU; at this priority it hardly delays calls of the host. A
    call that needs a device waits for it; the mount of a file system loads its module. Raises AgentError, OSError.
    """
    try:
        names = read_text(listed).split()
    except FileNotFoundError:
        return None
    child = children.spawn([modprobe, "-a", *names], stderr=2)
    os.setpriority(os.PRIO_PROCESS, child.pid, NICENESS)
    return child
