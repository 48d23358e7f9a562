"""A pod's network in memory: links that a test adds and takes away, and what was made of them."""

import asyncio

from pyshim.model.errors import FailedPrecondition, Unavailable
from pyshim.model.guest import NetworkAddress, NetworkInterface, NetworkNeighbour, NetworkRoute
from pyshim.model.ledger import Ledger
from pyshim.model.network import DirectNetwork, FollowedChanges, Wiring
from pyshim.model.vm import NicDevice, VfioDevice, VhostUserNic


class FakeNetwork:
    """Implements the seam `Network`. `wired` is the ids of devices whose taps exist, `open` those with descriptors."""

    def __init__(self) -> None:
        self.nics: tuple[NicDevice, ...] = ()
        self.interfaces: tuple[NetworkInterface, ...] = ()
        self.routes: tuple[NetworkRoute, ...] = ()
        self.neighbours: tuple[NetworkNeighbour, ...] = ()
        self.sysctls: dict[str, str] = {}
        self.vhost_user_nics: tuple[VhostUserNic, ...] = ()
        self.functions: dict[str, VfioDevice] = {}
        self.forward_listener = None
        self.wired: set[str] = set()
        self.open: set[str] = set()
        self.undroppable: set[str] = set()
        self.failing_looks = 0
        self.refused: tuple[str, ...] = ()
        self.looks = 0
        self.is_watched = True
        self._links: list[str] = []
        self._news = asyncio.Event()
        self._next = 0

    def add(self, *names: str) -> None:
        """Links the next look finds, each with an address, a route and a neighbour."""
        self._links += names
        self._news.set()

    def take(self, name: str) -> None:
        self._links.remove(name)
        self._news.set()

    async def changed(self) -> None:
        if not self.is_watched:
            raise Unavailable("watch network namespace: it is not watched")
        await self._news.wait()

    def is_changed(self) -> bool:
        found = self.is_watched and self._news.is_set()
        self._news.clear()
        return found

    async def follow(self) -> FollowedChanges:
        self.looks += 1
        self._news.clear()
        await asyncio.sleep(0)
        if self.failing_looks:
            self.failing_looks -= 1
            raise FailedPrecondition("scan links: ENOMEM (cannot allocate memory)")
        known = {nic.mac: nic for nic in self.nics}
        macs = {mac(name): name for name in self._links}
        gone = tuple(nic.id for nic in self.nics if nic.mac not in macs)
        added = tuple(self._nic(at) for at in macs if at not in known)
        self.nics = (*(nic for nic in self.nics if nic.id not in gone), *added)
        self._tell([macs[nic.mac] for nic in self.nics])
        return FollowedChanges(added=added, gone=gone, refused=self.refused)

    def _nic(self, at: str) -> NicDevice:
        nic = NicDevice(id=f"network-{self._next}", mac=at, tap_fds=(9,), vhost_fds=(), mtu=1500)
        self._next += 1
        self.wired.add(nic.id)
        self.open.add(nic.id)
        return nic

    def _tell(self, names: list[str]) -> None:
        self.interfaces = tuple(interface(name) for name in names)
        self.routes = tuple(route(name) for name in names)
        self.neighbours = tuple(
            NetworkNeighbour(address="10.0.0.9", device=name, mac=mac("x"), state=128, flags=0) for name in names
        )

    async def resolver(self) -> int | None:
        return None

    async def detach(self, nic_id: str) -> None:
        if nic_id in self.undroppable:
            raise FailedPrecondition(f"release link {nic_id!r}: EBUSY (device or resource busy)")
        self.wired.discard(nic_id)
        dropped = {nic.mac for nic in self.nics if nic.id == nic_id}
        self.nics = tuple(nic for nic in self.nics if nic.id != nic_id)
        self._tell([item.name for item in self.interfaces if item.mac not in dropped])

    def unwatch(self) -> None:
        self.is_watched = False

    def close_taps(self) -> None:
        self.open.clear()

    async def disconnect(self) -> None:
        self.close_taps()
        self.unwatch()
        self.wired.clear()


class FakeNetworks:
    """Implements the seam `NetworkConnector`: a network with the `links` of that moment."""

    def __init__(self) -> None:
        self.links: tuple[str, ...] = ("eth0",)
        self.network = FakeNetwork()
        self.queues = 0
        self.iommufd = False

    async def connect_direct(
        self, netns_path: str | None, direct: DirectNetwork, ledger: Ledger, *, iommufd: bool
    ) -> FakeNetwork:
        self.iommufd = iommufd
        network = self.network
        network.interfaces, network.routes, network.neighbours = direct.interfaces, direct.routes, direct.neighbours
        network.vhost_user_nics = direct.vhost_user
        network.functions = {
            mac: VfioDevice(id=address, host_address=address, iommufd=iommufd)
            for mac, address in direct.functions.items()
        }
        network.wired |= set(direct.functions.values())
        return network

    async def connect_new(self, netns_path: str, wiring: Wiring, ledger: Ledger, *, iommufd: bool) -> FakeNetwork:
        return self.network

    async def connect(self, netns_path: str, wiring: Wiring, ledger: Ledger, *, iommufd: bool) -> FakeNetwork:
        self.queues = wiring.queues
        self.network.add(*self.links)
        await self.network.follow()
        return self.network


def mac(name: str) -> str:
    return "02:00:" + ":".join(f"{byte:02x}" for byte in name.encode().rjust(4, b"\0")[:4])


def interface(name: str) -> NetworkInterface:
    return NetworkInterface(
        name=name,
        addresses=(NetworkAddress(address=f"10.0.0.{len(name)}", prefix_length=24),),
        mtu=1500,
        mac=mac(name),
        flags=0,
        type="virtual",
        device_path="",
    )


def route(name: str) -> NetworkRoute:
    return NetworkRoute(
        destination="10.9.0.0/16", gateway="", device=name, source="", scope=0, family=4, flags=0, mtu=0
    )
