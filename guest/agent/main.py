"""The program: read the kernel command line, listen, then import in spare time what the first calls will need."""

from __future__ import annotations

import os
import sys

from guest.agent.text_files import read_text

# The work of a container's birth, in the order in which the shim asks for it.
_PRELOAD = (
    "guest.agent.calls.health",
    "guest.agent.calls.sandbox",
    "guest.agent.storage.table",
    "guest.agent.storage.mounts",
    "ctypes",
    "guest.agent.net.netlink",
    "guest.agent.calls.network",
    "guest.agent.calls.guest",
    "guest.agent.container.spec",
    "guest.agent.calls.containers",
    "guest.agent.calls.processes",
    "guest.agent.calls.stats",
)


def _open_standard_fds() -> None:
    """fds 0-2 exist, so that nothing else ever gets these numbers."""
    while True:
        fd = os.open("/dev/null", os.O_RDWR)
        if fd > 2:
            os.close(fd)
            return
        os.set_inheritable(fd, True)


def _command_line() -> list[str]:
    try:
        return read_text("/proc/cmdline").split() + sys.argv[1:]
    except OSError:
        return sys.argv[1:]


def _power_off() -> None:
    from guest.agent.storage import syscalls

    os.sync()
    syscalls.power_off()


def main() -> int:
    """The agent serves until DestroySandbox; as PID 1 it then powers the machine off."""
    is_init = os.getpid() == 1
    if is_init and not os.path.exists("/proc/self"):
        from guest.agent import boot

        boot.mount_kernel_filesystems()
    _open_standard_fds()

    from guest.agent import log, settings
    from guest.agent.agent import Agent
    from guest.agent.transport import Server

    configured = settings.parse(_command_line())
    log.set_level(configured.log_level)
    for word in configured.problems:
        log.warning("ignored kernel parameter", word=word)
    agent = Agent(configured)
    agent.children.start()
    server = Server(agent, configured.server_addr)
    server.start()
    if configured.debug_console:
        from guest.agent import console

        console.start(agent)

    waiting = [name for name in _PRELOAD if name not in sys.modules]  # none in an agent that was kept with them

    def on_idle() -> bool:
        if waiting:
            __import__(waiting.pop(0))
        return bool(waiting)

    agent.loop.on_idle = on_idle
    agent.loop.run_until(lambda: agent.wants_shutdown and server.is_drained())
    log.info("sandbox destroyed, the agent ends")
    if is_init:
        _power_off()
    return 0
