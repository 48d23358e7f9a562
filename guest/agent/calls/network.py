"""Interfaces, routes, neighbours and iptables of the guest."""

from __future__ import annotations

from guest.agent.errors import DeadlineExceeded, Internal, InvalidArgument, Unimplemented
from guest.agent.net import links
from guest.agent.runtime.children import find_program
from guest.agent.wire.codec import Message

TYPE_CHECKING = False
if TYPE_CHECKING:
    from guest.agent.agent import Agent

_LOCK_WAIT_S = 5
_TIMEOUT_S = 30.0


async def update_interface(agent: Agent, request: Message) -> Message:
    """The interface is as asked. One that is not there yet is waited for: its driver may still be loading."""
    if not request.has("interface"):
        raise InvalidArgument("update interface: request has no interface")
    interface: Message = request.interface
    links.check_interface(interface)
    name = ""
    if interface.devicePath:
        name = await _wait_for_interface(agent, interface.devicePath)
    else:
        await _wait_for_link(agent, interface)
    links.update_interface(interface, name)
    return interface


async def _wait_for_link(agent: Agent, interface: Message) -> None:
    """A link with the address or the name is there; without one after the hotplug timeout the update says so."""
    from guest.agent.storage.uevent import wait_for

    try:
        await wait_for(agent, f"interface {interface.name!r}", lambda: links.name_of(interface))
    except DeadlineExceeded:
        return


async def _wait_for_interface(agent: Agent, path: str) -> str:
    from guest.agent.storage.block import SYS, pci_folder, pci_slots
    from guest.agent.storage.uevent import wait_for

    pci_slots(path)  # refuse nonsense before waiting for it

    def look() -> str | None:
        folder = pci_folder(SYS, path)
        return None if folder is None else links.interface_of(folder)

    return await wait_for(agent, f"interface at PCI path {path!r}", look)


async def update_routes(agent: Agent, request: Message) -> Message:
    """The routes are added or replaced; the answer is the whole table."""
    if not request.has("routes"):
        raise InvalidArgument("update routes: request has no routes")
    links.update_routes(request.routes.Routes)
    return Message("Routes", Routes=links.list_routes())


async def list_interfaces(agent: Agent, request: Message) -> Message:
    return Message("Interfaces", Interfaces=links.list_interfaces())


async def list_routes(agent: Agent, request: Message) -> Message:
    return Message("Routes", Routes=links.list_routes())


async def add_neighbors(agent: Agent, request: Message) -> None:
    if not request.has("neighbors"):
        raise InvalidArgument("add neighbours: request has no neighbours")
    links.add_neighbours(request.neighbors.ARPNeighbors)


async def get_iptables(agent: Agent, request: Message) -> Message:
    program = _program("ip6tables-save" if request.is_ipv6 else "iptables-save")
    ended = await agent.children.run([program], timeout_s=_TIMEOUT_S)
    if ended.code != 0:
        raise Internal(f"run {program!r}: {ended.stderr.decode('utf-8', 'replace').strip()}")
    return Message("GetIPTablesResponse", data=ended.stdout)


async def set_iptables(agent: Agent, request: Message) -> Message:
    program = _program("ip6tables-restore" if request.is_ipv6 else "iptables-restore")
    argv = [program, "--wait", str(_LOCK_WAIT_S)]
    ended = await agent.children.run(argv, stdin=request.data, timeout_s=_TIMEOUT_S)
    if ended.code != 0:
        raise Internal(f"run {program!r}: {ended.stderr.decode('utf-8', 'replace').strip()}")
    return Message("SetIPTablesResponse", data=ended.stdout)


def _program(name: str) -> str:
    found = find_program(name)
    if found is None:
        raise Unimplemented(f"iptables: the guest has no {name!r}")
    return found
