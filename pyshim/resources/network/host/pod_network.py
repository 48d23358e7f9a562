"""The pod's network on the host: a child in the pod's namespace finds and wires its links, the shim keeps the taps.

`HostNetworkConnector` makes a `HostNetwork` of the links of a namespace, or of the devices that a file names instead.

The shim stays in the host's namespace. It asks for the links, calls `plan/network.py`, writes each resource into the
ledger and only then has it made, so a crash between any two steps leaves nothing that the ledger does not name. All of
this is one session with one child: no other sandbox changes the namespace between the look and the wiring.
"""

import logging
from collections.abc import Callable, Mapping
from functools import partial

from msgspec.structs import replace

from pyshim.concurrency.deadlines import CHANGE_S, MARGIN_S, within_s
from pyshim.concurrency.undo import AcquiredEntries
from pyshim.host.fds import OwnedFd
from pyshim.host.os_errors import os_errors
from pyshim.host.processes.children import Children
from pyshim.host.python_child import MAX_FDS
from pyshim.model.decoding import decoded
from pyshim.model.errors import Internal, ShimError, Unavailable, Unimplemented
from pyshim.model.guest import NetworkInterface, NetworkNeighbour, NetworkRoute
from pyshim.model.ledger import Ledger, LedgerEntry, ResourceKind
from pyshim.model.network import DirectNetwork, FollowedChanges, NetworkModel, NetworkScan, Wiring
from pyshim.model.vm import NicDevice, VfioDevice, VhostUserNic
from pyshim.resources.network.host.functions import NetworkFunctions
from pyshim.resources.network.host.loopback_listener import LoopbackListener
from pyshim.resources.network.host.namespace import NetworkSession, PodNamespace, StepFailed
from pyshim.resources.network.host.rtnetlink import Watch, tap_alias
from pyshim.resources.network.host.taps import open_vhost_net
from pyshim.resources.network.plan.network import EndpointPlan, NetworkPlan, changed_plan, network_plan

log = logging.getLogger(__name__)


class HostNetwork:
    """Implements the seam `Network`. Owns the taps' descriptors until `close_taps`, the wiring until `disconnect`."""

    def __init__(
        self, ledger: Ledger, namespace: PodNamespace, wiring: Wiring, *, owner: str, functions: NetworkFunctions
    ) -> None:
        self.nics: tuple[NicDevice, ...] = ()
        self.interfaces: tuple[NetworkInterface, ...] = ()
        self.routes: tuple[NetworkRoute, ...] = ()
        self.neighbours: tuple[NetworkNeighbour, ...] = ()
        self.sysctls: Mapping[str, str] = {}
        self.vhost_user_nics: tuple[VhostUserNic, ...] = ()
        self.functions: dict[str, VfioDevice] = {}
        self.forward_listener: LoopbackListener | None = None
        self.model = wiring.model
        self._wiring = wiring
        self._owner = owner
        self._namespace = namespace
        self._functions = functions
        self._watch: Watch | None = None
        self._endpoints: tuple[EndpointPlan, ...] = ()
        self._next_number = 0
        self._made: dict[str, EndpointPlan] = {}
        """Endpoints with a tap, by the device's id; their link may be gone."""
        self._handed: dict[str, str] = {}
        """The names, by MAC, of links that are PCI functions."""
        self._taps: dict[str, int] = {}
        """The taps' indices, by name."""
        self._fds: list[OwnedFd] = []
        self._acquired = AcquiredEntries(ledger)

    def close_taps(self) -> None:
        """Our copies of the descriptors are closed; the VMM has its own. Idempotent."""
        while self._fds:
            self._fds.pop().close()

    async def disconnect(self) -> None:
        """The namespace is as CNI left it. Idempotent; raises the first ShimError after having tried everything."""
        self.close_taps()
        if self.forward_listener is not None:
            await self.forward_listener.close()
        self.unwatch()
        try:
            await self._functions.unbind()
        finally:
            await self._acquired.release(self._acquired.entries)

    # ---- the first look

    async def connect(self, session: NetworkSession, plan: Callable[..., NetworkPlan]) -> None:
        """Every endpoint is wired; after an error, `disconnect` undoes what was made until then."""
        _, fds = await session.ask("watch for changes", {"do": "watch"})
        self._watch = Watch(*fds)  # before the scan, so that no change is missed
        scan = await _scan(session, self._namespace.path, with_sysctls=True)
        found = plan(scan, self.model, pass_physical=self._wiring.pass_physical)
        self._log_left_out(found)
        self._adopt(found)
        self.sysctls = found.sysctls
        for endpoint in found.endpoints:
            self.nics += (await self._wire(session, endpoint),)
        for link in found.physical:  # last: a link leaves the namespace with its driver
            self.functions[link.mac] = await self._functions.bind(link.device)

    async def connect_new(self) -> None:
        """No link is there yet; those that come are reported from now on."""
        self._watch = Watch(await self._namespace.watched_from_birth())

    async def connect_direct(self, direct: DirectNetwork) -> None:
        """The devices that a plugin prepared, instead of the namespace's links."""
        self.vhost_user_nics = direct.vhost_user
        self.interfaces = direct.interfaces
        self.routes = direct.routes
        self.neighbours = direct.neighbours
        for mac, address in direct.functions.items():
            self.functions[mac] = await self._functions.bind(address)

    async def open_forward_listener(self, session: NetworkSession) -> None:
        """`forward_listener` takes connections to the namespace's loopback; None on a host that cannot steer them."""
        try:
            _, fds = await session.ask("redirect loopback connections by nftables", {"do": "steer"})
        except StepFailed as error:
            hint = "it needs Linux 5.12 with nf_tables and nft_redir"
            extra = {"netns": self._namespace.path, "error": str(error), "hint": hint}
            log.warning("port-forward is not possible", extra=extra)
            return
        if len(fds) != 2:
            raise Internal(f"redirect loopback connections by nftables: {len(fds)} descriptors came, 2 were wanted")
        self.forward_listener = LoopbackListener(*fds)

    def _adopt(self, plan: NetworkPlan) -> None:
        self._endpoints = plan.endpoints
        self._next_number += sum(endpoint.id not in self._made for endpoint in plan.endpoints)
        # Passed-through NICs have left the namespace; keep their last known data.
        handed = {mac: name for mac, name in self._handed.items() if mac in self.functions}
        names = frozenset(handed.values())
        self.interfaces = (*(item for item in self.interfaces if item.mac in handed), *plan.interfaces)
        self.routes = (*(item for item in self.routes if item.device in names), *plan.routes)
        self.neighbours = (*(item for item in self.neighbours if item.device in names), *plan.neighbours)
        self._handed |= {link.mac: link.name for link in plan.physical}

    def _log_left_out(self, plan: NetworkPlan) -> None:
        for sentence in (*plan.refused, *plan.left_out):
            log.warning("not configured in the guest", extra={"netns": self._namespace.path, "what": sentence})

    # ---- later ones

    async def changed(self) -> None:
        """The namespace differs from the last look. Raises Unavailable once disconnected."""
        if self._watch is None:
            raise Unavailable("watch network namespace: it is not connected")
        await self._watch.changed()

    async def resolver(self) -> int | None:
        """The fd of a socket, connected to the resolver that the caller runs in the namespace; None without one."""
        connection = await self._namespace.resolver_socket()
        return connection.detach() if connection is not None else None

    def unwatch(self) -> None:
        """The kernel reports no further changes. `changed` must not be called afterwards. Idempotent."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def is_changed(self) -> bool:
        """A change that may concern the guest has been reported since the last look, and is not reported again."""
        return self._watch is not None and self._watch.forget()

    async def follow(self) -> FollowedChanges:
        """New links are wired. The attributes show the namespace as it is now.

        A new link that cannot be wired is logged and left as it was found. Raises ShimError if the namespace could not
        be read.
        """
        before = {endpoint.id: endpoint for endpoint in self._endpoints}
        known = self._endpoints
        async with self._namespace.session(partial(self._forget_look, known)) as session:
            if self._watch is not None:
                self._watch.forget()
            found = changed_plan(await _scan(session, self._namespace.path), self.model, known, first=self._next_number)
            self._log_left_out(found)
            self._adopt(found)
            added, refused = [], [*found.refused]
            for endpoint in found.endpoints:
                earlier = before.pop(endpoint.id, None)
                if earlier is None:
                    try:
                        added.append(await self._wire(session, endpoint))
                    except ShimError as error:
                        refused.append(str(error))
                        await self._give_up(endpoint, error)
                elif earlier.link_name != endpoint.link_name:
                    self._renamed(endpoint)
        self.nics = (*(nic for nic in self.nics if nic.id not in before), *added)
        return FollowedChanges(added=tuple(added), gone=tuple(before), refused=tuple(refused))

    async def _forget_look(self, known: tuple[EndpointPlan, ...]) -> None:
        """The endpoints are the `known` ones again, so that the next look finds the new links once more.

        A resource that cannot be undone stays in the ledger.
        """
        new = {endpoint.id for endpoint in self._endpoints} - {endpoint.id for endpoint in known}
        self._endpoints = known
        for nic_id in new:
            try:
                await self.detach(nic_id)
            except ShimError as error:
                log.warning("undo of a link failed", extra={"netns": self._namespace.path, "error": str(error)})

    async def _give_up(self, endpoint: EndpointPlan, error: ShimError) -> None:
        extra = {"netns": self._namespace.path, "link": endpoint.link_name, "error": str(error)}
        log.warning("link not connected", extra=extra)
        await self.detach(endpoint.id)

    async def detach(self, nic_id: str) -> None:
        """Our tap and filters are off the device's link, which leaves the guest's configuration. Idempotent.

        The next look takes a link that is still there for a new one.
        """
        endpoint = self._made.pop(nic_id, None)
        if endpoint is None:
            return
        self.nics = tuple(nic for nic in self.nics if nic.id != nic_id)
        if endpoint in self._endpoints:
            self._endpoints = tuple(item for item in self._endpoints if item.id != nic_id)
            self.interfaces = tuple(item for item in self.interfaces if item.mac != endpoint.mac)
            self.routes = tuple(item for item in self.routes if item.device != endpoint.link_name)
            self.neighbours = tuple(item for item in self.neighbours if item.device != endpoint.link_name)
        # By its index: a new link may have the name, and our qdiscs.
        of_link = [entry for entry in self._acquired.entries if entry.detail.get("index") == endpoint.link_index]
        of_tap = [entry for entry in self._acquired.entries if entry.key == endpoint.tap_name]
        await self._acquired.release((*of_tap, *of_link))

    # ---- one endpoint

    async def _wire(self, session: NetworkSession, endpoint: EndpointPlan) -> NicDevice:
        self._made[endpoint.id] = endpoint
        taps = await self._make_tap(session, endpoint)
        await self._limit_rates(session, endpoint)
        vhosts = self._open_vhost(endpoint) if self._wiring.vhost_net else ()
        return endpoint.device(taps, vhosts)

    async def _make_tap(self, session: NetworkSession, endpoint: EndpointPlan) -> tuple[int, ...]:
        """The queues of the VM's device, connected to the endpoint's link."""
        name, link, queues = endpoint.tap_name, endpoint.link_name, self._wiring.queues
        self._acquired.acquire(self._entry(ResourceKind.LINK, name))
        is_filtered = self.model is NetworkModel.TCFILTER
        kind = "tap" if is_filtered else "macvtap"
        question = {"do": kind, "name": name, "mtu": endpoint.mtu, "queues": queues}
        question["alias"] = tap_alias(self._owner, link if is_filtered else "")
        if not is_filtered:
            question["link"] = endpoint.link_index
        self._taps[name], fds = await session.ask(f"make {kind} {name!r} for link {link!r}", question)
        self._fds += fds
        if len(fds) != queues:
            raise Internal(f"make {kind} {name!r}: {len(fds)} queues came, {queues} were wanted")
        made = self._entry(ResourceKind.LINK, name, self._taps[name])
        ingress = (self._entry(ResourceKind.INGRESS, link, endpoint.link_index),) if is_filtered else ()
        self._acquired.acquire(made, *ingress)
        if is_filtered:
            question = {"do": "redirect", "tap": self._taps[name], "link": endpoint.link_index}
            await session.ask(f"redirect link {link!r} to tap {name!r}", question)
        return tuple(fd.fileno() for fd in fds)

    async def _limit_rates(self, session: NetworkSession, endpoint: EndpointPlan) -> None:
        """Limits both directions: frames for the guest leave by the tap, frames from it by the link."""
        name, link, received = endpoint.tap_name, endpoint.link_name, self._wiring.received_bits_s
        if received and self.model is NetworkModel.MACVTAP:
            raise Unimplemented(f"limit what link {link!r} receives: a macvtap has no queue for it (hint: 'tcfilter')")
        if received:
            await self._limit(session, name, self._taps[name], received, endpoint.mtu)
        if self._wiring.sent_bits_s:
            self._acquired.acquire(self._entry(ResourceKind.QDISC, link, endpoint.link_index))
            await self._limit(session, link, endpoint.link_index, self._wiring.sent_bits_s, endpoint.mtu)

    async def _limit(self, session: NetworkSession, name: str, index: int, bits_s: int, mtu: int) -> None:
        question = {"do": "limit", "index": index, "bits_s": bits_s, "mtu": mtu}
        await session.ask(f"limit what link {name!r} sends to {bits_s} bit/s", question)

    def _open_vhost(self, endpoint: EndpointPlan) -> tuple[int, ...]:
        with os_errors(f"open vhost-net for {endpoint.tap_name!r}"):
            numbers = open_vhost_net(self._wiring.queues)
        self._fds += [OwnedFd(number) for number in numbers]
        return numbers

    def _renamed(self, endpoint: EndpointPlan) -> None:
        """The ledger's entries for the link have its present name: a new link may replace those of the former name."""
        self._made[endpoint.id] = endpoint
        kinds = [ResourceKind.INGRESS] if self.model is NetworkModel.TCFILTER else []
        kinds += [ResourceKind.QDISC] if self._wiring.sent_bits_s else []
        self._acquired.acquire(*(self._entry(kind, endpoint.link_name, endpoint.link_index) for kind in kinds))

    def _entry(self, kind: ResourceKind, name: str, index: int = 0) -> LedgerEntry:
        # A path like /proc/PID/ns/net leads to another namespace once the pid is another's; the inode shows that.
        # A link made later under this name has another index.
        detail: dict[str, str | int] = {"netns": self._namespace.path, "netns_inode": self._namespace.inode}
        return LedgerEntry(kind=kind, key=name, detail=detail | ({"index": index} if index else {}))


async def _scan(session: NetworkSession, netns_path: str, *, with_sysctls: bool = False) -> NetworkScan:
    """Settings are looked at when the sandbox starts: the guest gets them with its containers."""
    report, _ = await session.ask("scan links", {"do": "scan", "with_sysctls": with_sysctls})
    scanning = f"scan links in network namespace {netns_path!r}"
    return decoded(report, NetworkScan, lambda problem: Internal(f"{scanning}: malformed report: {problem}"))


TIMEOUT_S = 30.0
"""Seconds for all work in the namespace; a healthy host needs a fraction of one."""

_NOTHING_WIRED = Wiring(model=NetworkModel.NONE, queues=0, vhost_net=False)


class HostNetworkConnector:
    """Implements the seam `NetworkConnector`."""

    def __init__(
        self,
        *,
        children: Children,
        plan: Callable[..., NetworkPlan] = network_plan,
        owner: str = "",
        timeout_s: float = TIMEOUT_S,
        functions: Callable[..., NetworkFunctions] = NetworkFunctions,
    ) -> None:
        """`owner` is the sandbox: taps bear its name, so that they can be assigned without a ledger."""
        self._functions = functions
        self._owner = owner
        self._children = children
        self._plan = plan
        self._timeout_s = timeout_s

    @within_s(CHANGE_S + MARGIN_S, "connect network namespace '{netns_path}'")
    async def connect(self, netns_path: str, wiring: Wiring, ledger: Ledger, *, iommufd: bool = False) -> HostNetwork:
        """Every link of the namespace is connected; nothing is left behind on error.

        A namespace that has only loopback gives a network without devices. Raises NotFound or InvalidArgument for the
        path, Unimplemented or FailedPrecondition for a link that cannot be connected, DeadlineExceeded.
        """
        namespace = PodNamespace(self._children, netns_path, self._timeout_s)
        network = self._network(ledger, namespace, _within_limit(wiring, netns_path), iommufd=iommufd)
        async with namespace.session(partial(_undone, network, netns_path)) as session:
            await network.connect(session, self._plan)
            await network.open_forward_listener(session)
        interfaces = len(network.nics) + len(network.functions)
        log.info("network connected", extra={"netns": netns_path, "interfaces": interfaces})
        return network

    @within_s(CHANGE_S + MARGIN_S, "watch network namespace '{netns_path}'")
    async def connect_new(
        self, netns_path: str, wiring: Wiring, ledger: Ledger, *, iommufd: bool = False
    ) -> HostNetwork:
        """The links that come into the sandbox's own namespace, which has none yet, are reported from now on.

        Its loopback is not forwarded: port-forward is Kubernetes', which prepares the namespace itself.
        """
        namespace = PodNamespace(self._children, netns_path, self._timeout_s)
        network = self._network(ledger, namespace, _within_limit(wiring, netns_path), iommufd=iommufd)
        await network.connect_new()
        log.info("network namespace made", extra={"netns": netns_path})
        return network

    @within_s(CHANGE_S + MARGIN_S, "connect directly attached network")
    async def connect_direct(
        self, netns_path: str | None, direct: DirectNetwork, ledger: Ledger, *, iommufd: bool = False
    ) -> HostNetwork:
        """The functions that `direct` names are VFIO's; of the namespace, if any, only the loopback is used.

        Nothing is left behind on error. Raises NotFound or FailedPrecondition naming the function, and what `connect`
        does for the path.
        """
        namespace = PodNamespace(self._children, netns_path or "", self._timeout_s)
        network = self._network(ledger, namespace, _NOTHING_WIRED, iommufd=iommufd)
        try:
            await network.connect_direct(direct)
            if netns_path is not None:
                async with namespace.session() as session:
                    await network.open_forward_listener(session)
        except BaseException:
            await _undone(network, netns_path or "")
            raise
        log.info("network connected", extra={"direct": len(direct.interfaces)})
        return network

    def _network(self, ledger: Ledger, namespace: PodNamespace, wiring: Wiring, *, iommufd: bool) -> HostNetwork:
        functions = self._functions(ledger, iommufd=iommufd)
        return HostNetwork(ledger, namespace, wiring, owner=self._owner, functions=functions)


def _within_limit(wiring: Wiring, netns_path: str) -> Wiring:
    """`wiring` with no more queues than descriptors of one answer of the child."""
    if wiring.queues <= MAX_FDS:
        return wiring
    log.warning("queues limited", extra={"netns": netns_path, "wanted": wiring.queues, "limit": MAX_FDS})
    return replace(wiring, queues=MAX_FDS)


async def _undone(network: HostNetwork, netns_path: str) -> None:
    """As much as possible is undone. A failure is only logged, since the caller raises its own error."""
    try:
        await network.disconnect()
    except ShimError as error:
        log.warning("undo of the network failed", extra={"netns": netns_path, "error": str(error)})
