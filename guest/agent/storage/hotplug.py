"""Waiting for devices: sysfs is looked at, and looked at again whenever the kernel announces a device.

Looking at the state instead of collecting announcements means that nothing is missed that appeared before the first
question.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress

from guest.agent.errors import DeadlineExceeded

_NETLINK_KOBJECT_UEVENT = 15  # linux/netlink.h
_KERNEL_GROUP = 1
# Seconds between two looks without news: a driver may bind without announcing it.
_LOOK_AGAIN_S = 0.1


class Hotplug:
    """Devices that the host plugs in. `timeout_s` is how long one is waited for."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    async def wait_for(self, what: str, look: Callable[[], str | None]) -> str:
        """What `look` returns once it is not None. DeadlineExceeded after the timeout names `what`.

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
    # It ends with EAGAIN: all read; or ENOBUFS: some were lost, which looking again makes good.
    with suppress(OSError):
        while listener.recv(65536):
            pass
    news.set()
