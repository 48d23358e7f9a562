"""The pod's network on the host: a child in the pod's namespace finds and wires its links, the shim keeps the taps.

The shim stays in the host's namespace. It asks, plans, writes each resource into the ledger and only then has it made,
so a crash between any two steps leaves nothing that the ledger does not name.
"""

import asyncio
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pyshim.host.fds import OwnedFd
from pyshim.host.network.link_search import tap_alias
from pyshim.host.network.loopback_door import LoopbackDoor
from pyshim.host.network.messages import MAX_FDS
from pyshim.host.network.netns import held_netns
from pyshim.host.network.session import NetworkSession, StepFailed
from pyshim.host.network.taps import open_vhost_net
from pyshim.host.processes.children import Children
from pyshim.host.processes.launch import describe_os_error
from pyshim.model.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    ShimError,
    Unimplemented,
)
from pyshim.model.ledger import Ledger, LedgerEntry, ResourceKind
from pyshim.model.network import (
    AddressReport,
    LinkReport,
    NeighbourReport,
    NetworkModel,
    NetworkScan,
    RateLimits,
    RouteReport,
    network_model,
)

if TYPE_CHECKING:
    from hypervisors.base import NicDevice
    from pyshim.model.guest import NetworkInterface, NetworkNeighbour, NetworkRoute
    from pyshim.plan.network import EndpointPlan, NetworkPlan

log = logging.getLogger("pyshim.host.network")

TIMEOUT_S = 30.0
"""For everything in the namespace together; a healthy host needs a fraction of a second."""


class HostNetwork:
    """Implements the seam `Network`. Owns the taps' descriptors until `close_taps`, the wiring until `disconnect`."""

    def __init__(self, ledger: Ledger, netns_path: str, model: NetworkModel, owner: str = "") -> None:
        self.nics: tuple[NicDevice, ...] = ()
        self.interfaces: tuple[NetworkInterface, ...] = ()
        self.routes: tuple[NetworkRoute, ...] = ()
        self.neighbours: tuple[NetworkNeighbour, ...] = ()
        self.door: LoopbackDoor | None = None
        self._ledger = ledger
        self._owner = owner
        self._netns_path = netns_path
        self._netns_inode = 0
        self.model = model
        self._taps: dict[str, int] = {}
        """Their indices by name."""
        self._fds: list[OwnedFd] = []
        self._held: list[LedgerEntry] = []

    def close_taps(self) -> None:
        """Our copies of the descriptors are closed; the VMM has its own. Idempotent."""
        while self._fds:
            self._fds.pop().close()

    async def disconnect(self) -> None:
        """The namespace is as CNI left it. Idempotent; raises the first ShimError after having tried everything."""
        self.close_taps()
        if self.door is not None:
            self.door.close()
        failure: ShimError | None = None
        for entry in reversed(tuple(self._held)):
            try:
                await self._ledger.release(entry)
            except ShimError as error:
                failure = failure or error
            else:
                self._held.remove(entry)
        if failure is not None:
            raise failure

    async def connect(
        self,
        session: NetworkSession,
        plan: "NetworkPlan",
        queues: int,
        vhost_net: bool,
        rates: RateLimits,
        *,
        netns_inode: int,
    ) -> None:
        """Every endpoint is wired; on an error, what was made until then is still held."""
        self._netns_inode = netns_inode
        for endpoint in plan.endpoints:
            taps = await self._make_tap(session, endpoint, queues)
            await self._limit_rates(session, endpoint, rates)
            vhosts = self._open_vhost(endpoint, queues) if vhost_net else ()
            self.nics += (endpoint.device(taps, vhosts),)
        self.interfaces = plan.interfaces
        self.routes = plan.routes
        self.neighbours = plan.neighbours

    async def open_door(self, session: NetworkSession) -> None:
        """Connections to the namespace's loopback come to `door`; on a host that cannot steer them it stays None."""
        try:
            _, fds = await session.ask("steer loopback connections", {"do": "steer"})
        except StepFailed as error:
            log.warning("port-forward is not possible", extra={"netns": self._netns_path, "error": str(error)})
            return
        if len(fds) != 2:
            raise Internal(f"steer loopback connections: {len(fds)} descriptors came, 2 were wanted")
        self.door = LoopbackDoor(*fds)

    async def _make_tap(self, session: NetworkSession, endpoint: "EndpointPlan", queues: int) -> tuple[int, ...]:
        """The queues behind which the VM will be, connected to the endpoint's link."""
        name, link = endpoint.tap_name, endpoint.link_name
        self._hold(ResourceKind.LINK, name)
        kind = "macvtap" if self.model is NetworkModel.MACVTAP else "tap"
        question = {"do": kind, "name": name, "link": endpoint.link_index, "mtu": endpoint.mtu, "queues": queues}
        question["alias"] = tap_alias(self._owner, link if self.model is NetworkModel.TCFILTER else "")
        self._taps[name], fds = await session.ask(f"make {kind} {name!r} for link {link!r}", question)
        self._fds += fds
        if len(fds) != queues:
            raise Internal(f"make {kind} {name!r}: {len(fds)} queues came, {queues} were wanted")
        if self.model is NetworkModel.TCFILTER:
            self._hold(ResourceKind.INGRESS, link)
            question = {"do": "redirect", "tap": self._taps[name], "link": endpoint.link_index}
            await session.ask(f"redirect link {link!r} to tap {name!r}", question)
        return tuple(fd.fileno() for fd in fds)

    async def _limit_rates(self, session: NetworkSession, endpoint: "EndpointPlan", rates: RateLimits) -> None:
        """What the guest receives leaves by the tap, what it sends by the link."""
        name, link = endpoint.tap_name, endpoint.link_name
        if rates.received and self.model is NetworkModel.MACVTAP:
            raise Unimplemented(f"limit what link {link!r} receives: a macvtap has no queue for it (hint: 'tcfilter')")
        if rates.received:
            await self._limit(session, name, self._taps[name], rates.received, endpoint.mtu)
        if rates.sent:
            self._hold(ResourceKind.QDISC, link)
            await self._limit(session, link, endpoint.link_index, rates.sent, endpoint.mtu)

    async def _limit(self, session: NetworkSession, name: str, index: int, bits_s: int, mtu: int) -> None:
        question = {"do": "limit", "index": index, "bits_s": bits_s, "mtu": mtu}
        await session.ask(f"limit what link {name!r} sends to {bits_s} bit/s", question)

    def _open_vhost(self, endpoint: "EndpointPlan", queues: int) -> tuple[int, ...]:
        try:
            numbers = open_vhost_net(queues)
        except OSError as error:
            raise FailedPrecondition(f"open vhost-net for {endpoint.tap_name!r}: {describe_os_error(error)}") from error
        self._fds += [OwnedFd(number) for number in numbers]
        return numbers

    def _hold(self, kind: ResourceKind, name: str) -> None:
        # A path like /proc/PID/ns/net leads elsewhere once the pid is another's: the inode tells.
        detail: dict[str, str | int] = {"netns": self._netns_path, "netns_inode": self._netns_inode}
        entry = LedgerEntry(kind=kind, key=name, detail=detail)
        self._ledger.acquire(entry)
        self._held.append(entry)


class HostNetworkConnector:
    """Implements the seam `NetworkConnector`; `plan` is `pyshim.plan.network.network_plan`."""

    def __init__(
        self,
        *,
        children: Children,
        plan: Callable[[NetworkScan, NetworkModel], "NetworkPlan"],
        owner: str = "",
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """`owner` is the sandbox: taps bear its name, for whoever finds them without a ledger."""
        self._owner = owner
        self._children = children
        self._plan = plan
        self._timeout_s = timeout_s

    async def connect(
        self, netns_path: str, model: str, queues: int, ledger: Ledger, *, vhost_net: bool, rates: RateLimits
    ) -> HostNetwork:
        """Every endpoint of the namespace is wired to a tap of `queues` queues; nothing is left behind on error.

        A namespace with nothing but loopback gives a network without devices. Raises NotFound or InvalidArgument for
        the path, Unimplemented or FailedPrecondition for a link that cannot be wired, DeadlineExceeded.
        """
        if queues < 1:
            raise InvalidArgument(f"connect network namespace {netns_path!r}: {queues} queues")
        network = HostNetwork(ledger, netns_path, network_model(model), self._owner)
        if network.model is NetworkModel.NONE:
            return network
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._connect(network, netns_path, min(queues, MAX_FDS), vhost_net, rates)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"connect network namespace {netns_path!r}: not done within {self._timeout_s:g} s"
            ) from error
        log.info("network connected", extra={"netns": netns_path, "interfaces": len(network.nics)})
        return network

    async def _connect(
        self, network: HostNetwork, netns_path: str, queues: int, vhost_net: bool, rates: RateLimits
    ) -> None:
        with held_netns(netns_path) as netns_fd:
            try:
                async with await NetworkSession.open(self._children, netns_fd, netns_path) as session:
                    report, _ = await session.ask("scan links", {"do": "scan"})
                    plan = self._plan(_scan_from(report, netns_path), network.model)
                    for sentence in plan.left_out:
                        log.warning("not told to the guest", extra={"netns": netns_path, "route": sentence})
                    inode = os.fstat(netns_fd).st_ino
                    await network.connect(session, plan, queues, vhost_net, rates, netns_inode=inode)
                    await network.open_door(session)
            except BaseException:
                # The child is gone by now, so nothing is made any more; and nobody else may look at half of it.
                await _undo(network, netns_path)
                raise


async def _undo(network: HostNetwork, netns_path: str) -> None:
    """As much as possible is undone; what fails stays in the ledger, and the first error stays the caller's."""
    try:
        await network.disconnect()
    except ShimError as error:
        log.warning("undo of the network failed", extra={"netns": netns_path, "error": str(error)})


def _scan_from(report: Any, netns_path: str) -> NetworkScan:
    try:
        return NetworkScan(
            links=tuple(LinkReport(**row) for row in report["links"]),
            addresses=tuple(AddressReport(**row) for row in report["addresses"]),
            routes=tuple(RouteReport(**row) for row in report["routes"]),
            neighbours=tuple(NeighbourReport(**row) for row in report["neighbours"]),
        )
    except (KeyError, TypeError) as error:
        raise Internal(f"scan links in network namespace {netns_path!r}: malformed report: {error}") from error
