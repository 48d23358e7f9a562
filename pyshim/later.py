"""What an executed shim has no use for before its VMM runs: not loaded with `serve`, for which Create has to wait.

Each of these is imported where it is used, which for most is while QEMU or the guest comes up. Those that nobody has
used are loaded when nothing is asked of the shim, so that its code is that of its start, whatever is installed while it
runs. A zygote has loaded all of it before its first fork.
"""

import asyncio
import importlib

LATER = (
    "hypervisors.qemu.qmp",
    "hypervisors.qemu.hotplug",
    "pyshim.agent.client",
    "pyshim.task.translate_events",
    "pyshim.task.translate_stats",
    "pyshim.host.cgroups.removal",
    "pyshim.host.network.link_removal",
    "pyshim.plan.relay",
)
PAUSE_S = 0.01
"""For a call that has arrived meanwhile."""


async def load_while(idle: asyncio.Event, *, pause_s: float = PAUSE_S) -> None:
    """All of LATER is loaded, one by one, each at a moment when `idle` was set."""
    for name in LATER:
        await asyncio.sleep(pause_s)
        await idle.wait()
        importlib.import_module(name)
