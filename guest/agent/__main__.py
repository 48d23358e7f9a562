"""The program: read the kernel command line, make every part of the agent, serve until the sandbox is destroyed."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import sys

from pyshim.ttrpc import Server

from guest.agent import console, log, mounts, settings, syscalls, transport
from guest.agent.calls.containers import ContainerCalls, ProcessCalls
from guest.agent.calls.network import NetworkCalls
from guest.agent.calls.sandbox import GuestCalls, SandboxCalls
from guest.agent.calls.stats import StatsCalls
from guest.agent.calls.volumes import VolumeCalls
from guest.agent.children import PYTHON_ENVIRONMENT, Children, python_program
from guest.agent.container.cgroup import OomEvents
from guest.agent.container.container import Containers
from guest.agent.container.crun import Crun
from guest.agent.container.named_devices import NamedDevices
from guest.agent.container.sandbox import Sandbox
from guest.agent.errors import AgentError
from guest.agent.files import read_text
from guest.agent.pull.images import Images
from guest.agent.service import Handler, services
from guest.agent.settings import ForwarderSettings, Settings
from guest.agent.storage.hotplug import Hotplug, load_drivers
from guest.agent.storage.table import StorageTable

_log = logging.getLogger(__name__)

# Seconds that calls under way get to end once the sandbox is destroyed: the answer to that call is one of them.
_SHUTDOWN_GRACE_S = 1.0


def main() -> int:
    """The agent serves until DestroySandbox; as process 1 it then powers the machine off."""
    is_init = os.getpid() == 1
    if is_init and not os.path.exists("/proc/self"):
        mounts.mount_kernel_filesystems()
    _open_standard_fds()
    _raise_file_limit()
    configured = settings.parse(_command_line())
    log.set_up(configured.log_level)
    for word in configured.problems:
        _log.warning("ignored kernel parameter", extra={"word": word})
    if not is_init:
        syscalls.become_subreaper()  # crun's orphans become the agent's children, as they would become process 1's
    asyncio.run(_serve(configured))
    _log.info("sandbox destroyed, the agent ends")
    if is_init:
        os.sync()
        syscalls.power_off()
    return 0


def _open_standard_fds() -> None:
    """fds 0-2 exist, so that no other file gets these numbers."""
    while (fd := os.open("/dev/null", os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def _raise_file_limit() -> None:
    """The agent may open as many files as it is allowed at most: each container takes some twenty."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _command_line() -> list[str]:
    try:
        return read_text("/proc/cmdline").split() + sys.argv[1:]
    except OSError:
        return sys.argv[1:]


async def _serve(configured: Settings) -> None:
    """The agent has served until the sandbox was destroyed and that call was answered."""
    children = Children()
    children.start()
    if configured.forwarder is not None:
        _start_forwarder(children, configured.forwarder)
    destroyed = asyncio.Event()
    server = Server(services=_services(configured, children, destroyed))
    tasks = [asyncio.create_task(transport.serve(server, configured.server_addr), name="transport")]
    if configured.debug_console:
        tasks.append(asyncio.create_task(console.serve(children, configured.debug_console_vport), name="console"))
    if os.getpid() == 1:  # otherwise the kernel is not this guest's
        try:
            load_drivers(children)
        except (AgentError, OSError) as error:
            _log.warning("drivers not loaded", extra={"error": str(error)})
    waiting = asyncio.create_task(destroyed.wait(), name="destroyed")
    await asyncio.wait({waiting, tasks[0]}, return_when=asyncio.FIRST_COMPLETED)
    if not destroyed.is_set():
        tasks[0].result()  # raises: it ends by itself only when it cannot serve
    await server.shutdown(_SHUTDOWN_GRACE_S)


def _services(configured: Settings, children: Children, destroyed: asyncio.Event) -> dict[str, dict[str, Handler]]:
    sandbox = Sandbox()
    crun = Crun(children, pipe_size=configured.container_pipe_size)
    containers = Containers(crun)
    hotplug = Hotplug(configured.hotplug_timeout_s)
    images = Images(children=children, source=configured.image_source, timeout_s=configured.image_pull_timeout_s)
    storages = StorageTable(children=children, hotplug=hotplug, images=images)
    oom_events = OomEvents()
    left: set[str] = set()
    named_devices = NamedDevices(timeout_s=configured.cdi_timeout_s, reads_environment=configured.visible_cdi_devices)
    return services(
        containers=ContainerCalls(
            sandbox=sandbox,
            containers=containers,
            crun=crun,
            storages=storages,
            hotplug=hotplug,
            named_devices=named_devices,
            oom_events=oom_events,
            children=children,
            left=left,
        ),
        guest=GuestCalls(hotplug=hotplug),
        network=NetworkCalls(hotplug=hotplug, children=children),
        processes=ProcessCalls(containers=containers),
        sandbox=SandboxCalls(
            sandbox=sandbox,
            containers=containers,
            storages=storages,
            oom_events=oom_events,
            children=children,
            on_destroyed=destroyed.set,
        ),
        stats=StatsCalls(containers=containers, oom_events=oom_events),
        volumes=VolumeCalls(hotplug=hotplug, children=children, left=left),
    )


def _start_forwarder(children: Children, asked: ForwarderSettings) -> None:
    """A child forwards, in the network namespace with the interface. The agent moves to one with a loopback only."""
    os.makedirs(os.path.dirname(asked.agent), exist_ok=True)
    argv = python_program("guest.forwarder", f"--port={asked.port}", f"--address={asked.address}", asked.agent)
    forwarder = children.spawn(argv, stderr=2, environment=PYTHON_ENVIRONMENT)
    forwarder.when_ended(lambda code: _log.error("forwarder ended: the agent cannot be reached", extra={"code": code}))
    syscalls.unshare(syscalls.CLONE_NEWNET)


if __name__ == "__main__":
    sys.exit(main())
