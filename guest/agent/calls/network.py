"""Interfaces, routes, neighbours and iptables of the guest."""

from __future__ import annotations

from protos.agent import agent_pb2 as pb
from protos.agent.types_pb2 import Interface

from guest.agent import links
from guest.agent.children import Children
from guest.agent.errors import DeadlineExceeded, InvalidArgument, NotFound, Unimplemented
from guest.agent.storage.devices import SYS, pci_folder, pci_slots
from guest.agent.storage.hotplug import Hotplug

# Seconds. The lock is xtables', which other programs of the guest may hold.
_LOCK_WAIT_S = 5
_TIMEOUT_S = 30.0


class NetworkCalls:
    def __init__(self, *, hotplug: Hotplug, children: Children) -> None:
        self._hotplug = hotplug
        self._children = children

    async def update_interface(self, request: pb.UpdateInterfaceRequest) -> Interface:
        """The interface is as requested. It may appear late: its driver may still be loading."""
        if not request.HasField("interface"):
            raise InvalidArgument("update interface: request has no interface")
        interface = request.interface
        links.check_interface(interface)
        if interface.devicePath:
            name = await self._wait_for_place(interface.devicePath)
        else:
            name = await self._wait_for_link(interface)
        links.update_interface(interface, name)
        return interface

    async def _wait_for_link(self, interface: Interface) -> str:
        """The present name of the link with the interface's hardware address, else with its name."""
        try:
            return await self._hotplug.wait_for(f"interface {interface.name!r}", lambda: links.name_of(interface))
        except DeadlineExceeded as error:
            raise NotFound(f"{error}; the guest has none with hardware address {interface.hwAddr!r}") from error

    async def _wait_for_place(self, path: str) -> str:
        pci_slots(path)  # refuse a malformed path before waiting for it

        def look() -> str | None:
            folder = pci_folder(SYS, path)
            return None if folder is None else links.interface_of(folder)

        return await self._hotplug.wait_for(f"interface at PCI path {path!r}", look)

    async def update_routes(self, request: pb.UpdateRoutesRequest) -> pb.Routes:
        """The routes are added or replaced; the answer is the whole table."""
        if not request.HasField("routes"):
            raise InvalidArgument("update routes: request has no routes")
        links.update_routes(request.routes.Routes)
        return pb.Routes(Routes=links.list_routes())

    async def list_interfaces(self, request: pb.ListInterfacesRequest) -> pb.Interfaces:
        return pb.Interfaces(Interfaces=links.list_interfaces())

    async def list_routes(self, request: pb.ListRoutesRequest) -> pb.Routes:
        return pb.Routes(Routes=links.list_routes())

    async def add_neighbors(self, request: pb.AddARPNeighborsRequest) -> None:
        if not request.HasField("neighbors"):
            raise InvalidArgument("add neighbours: request has no neighbours")
        links.add_neighbours(request.neighbors.ARPNeighbors)

    async def get_iptables(self, request: pb.GetIPTablesRequest) -> pb.GetIPTablesResponse:
        return pb.GetIPTablesResponse(data=await self._tables("save", request.is_ipv6))

    async def set_iptables(self, request: pb.SetIPTablesRequest) -> pb.SetIPTablesResponse:
        options = ("--wait", str(_LOCK_WAIT_S))
        return pb.SetIPTablesResponse(data=await self._tables("restore", request.is_ipv6, *options, stdin=request.data))

    async def _tables(self, verb: str, is_ipv6: bool, *options: str, stdin: bytes = b"") -> bytes:
        name = f"{'ip6tables' if is_ipv6 else 'iptables'}-{verb}"
        return await self._children.call(
            name, *options, doing=f"{verb} iptables", stdin=stdin, timeout_s=_TIMEOUT_S, missing=Unimplemented
        )
