"""Waiting for devices: sysfs is looked at, and looked at again whenever the kernel announces a device.

Looking at the state instead of collecting announcements means that nothing is missed that appeared before the first
question.
"""

from __future__ import annotations

import _socket
import select

from guest.agent.errors import DeadlineExceeded
from guest.agent.runtime.loop import Promise

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from guest.agent.agent import Agent

_NETLINK_KOBJECT_UEVENT = 15
_KERNEL_GROUP = 1
_LOOK_AGAIN_S = 0.1


async def wait_for(agent: Agent, what: str, look: Callable[[], str | None]) -> str:
    """What `look` returns once it is not None. DeadlineExceeded after the hotplug timeout names `what`.

    `look` runs at once, after every kernel announcement, and ten times a second: a driver may bind without announcing.
    """
    found = look()
    if found is not None:
        return found
    loop = agent.loop
    listener = _socket.socket(_socket.AF_NETLINK, _socket.SOCK_DGRAM | _socket.SOCK_CLOEXEC, _NETLINK_KOBJECT_UEVENT)
    listener.setblocking(False)
    expired = False
    news = Promise(loop)

    def on_uevent(_events: int) -> None:
        _drain(listener)
        news.resolve()

    def on_time() -> None:
        nonlocal expired
        expired = True
        news.resolve()

    timer = loop.call_later(agent.settings.hotplug_timeout_s, on_time)
    try:
        listener.bind((0, _KERNEL_GROUP))
        loop.watch(listener.fileno(), select.EPOLLIN, on_uevent)
        while True:
            news = Promise(loop)
            found = look()
            if found is not None:
                return found
            if expired:
                raise DeadlineExceeded(f"wait for {what}: not there after {agent.settings.hotplug_timeout_s:g} s")
            again = loop.call_later(_LOOK_AGAIN_S, news.resolve)
            try:
                await news
            finally:
                again.cancel()
    finally:
        timer.cancel()
        loop.unwatch(listener.fileno())
        listener.close()


def _drain(listener: _socket.socket) -> None:
    try:
        while listener.recv(65536):
            pass
    except OSError:
        pass  # EAGAIN: all read; ENOBUFS: some were lost, which looking again makes good
