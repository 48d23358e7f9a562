"""Connects a sandbox's network on the host: the links of a namespace, or the devices that a file names instead."""

import logging
from collections.abc import Callable
from functools import partial

from msgspec.structs import replace

from pyshim.concurrency.deadlines import CHANGE_S, MARGIN_S, within_s
from pyshim.host.processes.children import Children
from pyshim.host.python_child.messages import MAX_FDS
from pyshim.model.errors import ShimError
from pyshim.model.ledger import Ledger
from pyshim.model.network import DirectNetwork, NetworkModel, Wiring
from pyshim.resources.network.host.functions import NetworkFunctions
from pyshim.resources.network.host.pod_network import HostNetwork
from pyshim.resources.network.host.session import PodNamespace
from pyshim.resources.network.plan.network import NetworkPlan, network_plan

log = logging.getLogger(__name__)

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
        if wiring.queues > MAX_FDS:
            log.warning("queues limited", extra={"netns": netns_path, "wanted": wiring.queues, "limit": MAX_FDS})
            wiring = replace(wiring, queues=MAX_FDS)
        namespace = PodNamespace(self._children, netns_path, self._timeout_s)
        network = self._network(ledger, namespace, wiring, iommufd=iommufd)
        async with namespace.session(partial(_undone, network, netns_path)) as session:
            await network.connect(session, self._plan)
            await network.open_forward_listener(session)
        interfaces = len(network.nics) + len(network.functions)
        log.info("network connected", extra={"netns": netns_path, "interfaces": interfaces})
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


async def _undone(network: HostNetwork, netns_path: str) -> None:
    """As much as possible is undone. A failure is only logged, since the caller raises its own error."""
    try:
        await network.disconnect()
    except ShimError as error:
        log.warning("undo of the network failed", extra={"netns": netns_path, "error": str(error)})
