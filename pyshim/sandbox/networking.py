"""The pod's network in one sandbox: connected on the host, handed to the VM, told to the guest.

The order is the sandbox's: `connect` before the VM is made, `close_taps` once it has its own descriptors, `set_up`
before anything runs in the guest, `serve` after.
"""

from collections.abc import Callable

from hypervisors.base import Hypervisor, VmConfig
from pyshim.model.ids import ContainerId
from pyshim.model.ledger import Ledger
from pyshim.model.network import rate_limits
from pyshim.model.trace import traced
from pyshim.plan.kind import ContainerKind
from pyshim.plan.sandbox import SandboxPlan, with_nics
from pyshim.sandbox.direct_devices import refuse_direct_devices
from pyshim.sandbox.network_changes import NetworkChanges
from pyshim.sandbox.port_forward import PortForward
from pyshim.sandbox.seams import Agent, Host, Network, NetworkConnector
from pyshim.sandbox.tasks import TaskOwner
from pyshim.sandbox.undo import Undo


class SandboxNetwork:
    def __init__(
        self,
        *,
        plan: SandboxPlan,
        connector: NetworkConnector,
        host: Host,
        hypervisor: Hypervisor,
        ledger: Ledger,
        tasks: TaskOwner,
        undo: Undo,
        on_change: Callable[[], None],
    ) -> None:
        """`undo` is the sandbox's: what is connected or served here is pushed there.

        `on_change` hears of interfaces that came or went later.
        """
        self.connected: Network | None = None
        """None for a pod without a network of its own."""
        self._plan = plan
        self._connector = connector
        self._host = host
        self._hypervisor = hypervisor
        self._ledger = ledger
        self._tasks = tasks
        self._undo = undo
        self._on_change = on_change
        self._forward: PortForward | None = None

    @traced("connect network")
    async def connect(self) -> None:
        plan = self._plan
        model = plan.config.runtime.internetworking_model
        await refuse_direct_devices(plan, self._host)
        if plan.netns_path is None or model == "none":
            return
        network = await self._connector.connect(
            plan.netns_path,
            model,
            plan.config.hypervisor.network_queues or plan.vm.cpu.boot_vcpus,
            self._ledger,
            vhost_net=not plan.config.hypervisor.disable_vhost_net,
            rates=rate_limits(
                received=plan.config.hypervisor.rx_rate_limiter_max_rate,
                sent=plan.config.hypervisor.tx_rate_limiter_max_rate,
            ),
        )
        self._undo.push(network.disconnect)
        self.connected = network

    def vm(self) -> VmConfig:
        """The VM as planned, with its network devices."""
        return with_nics(self._plan.vm, self.connected.nics) if self.connected else self._plan.vm

    def close_taps(self) -> None:
        """Our copies of the descriptors are closed; the VMM has its own. Idempotent."""
        if self.connected is not None:
            self.connected.close_taps()

    async def set_up(self, agent: Agent) -> None:
        """The guest has its interfaces, routes and neighbours."""
        network = self.connected
        if network is None:
            return
        for interface in network.interfaces:
            await agent.update_interface(interface)
        if network.routes:
            await agent.update_routes(network.routes)
        if network.neighbours:
            await agent.add_neighbours(network.neighbours)

    def serve(self, agent: Agent) -> None:
        """Connections to the loopback of the pod's namespace are answered by the guest, which also gets interfaces that
        come later.
        """
        network = self.connected
        if network is None:
            return
        self._follow(network, agent)
        if network.door is not None:
            self._forward = PortForward(
                plan=self._plan, door=network.door, agent=agent, host=self._host, tasks=self._tasks
            )
            self._forward.start()
            self._undo.push(self._forward.close)

    def _follow(self, network: Network, agent: Agent) -> None:
        if not self._hypervisor.capabilities().network_hotplug:
            network.unwatch()
            return
        changes = NetworkChanges(
            sandbox_id=self._plan.sandbox_id,
            network=network,
            hypervisor=self._hypervisor,
            agent=agent,
            tasks=self._tasks,
            on_change=self._on_change,
        )
        changes.start()
        self._undo.push(changes.close)

    def has_container(self, container_id: ContainerId) -> None:
        """The pod has this container now: unless it is the pause container, it may listen on ports."""
        pause = self._plan.kind is ContainerKind.POD_SANDBOX and str(container_id) == str(self._plan.sandbox_id)
        if self._forward is not None and not pause:
            self._forward.has_listeners = True
