"""The pod's network in one sandbox: connected on the host, handed to the VM, configured in the guest.

`SandboxNetwork` is the host's side, `GuestNetwork` that of one VM. The order is the sandbox's: `connect` before the VM
is made, `close_taps` once it has its own descriptors, `set_up` before anything runs in the guest, `serve` after.
"""

from collections.abc import Mapping

from msgspec.structs import replace

from pyshim.model.errors import FailedPrecondition, NotFound
from pyshim.model.ids import ContainerId
from pyshim.model.network import DirectNetwork, NetworkModel, Wiring
from pyshim.model.observation import traced
from pyshim.model.oci import ContainerKind
from pyshim.model.seams import Agent, Network, NetworkConnector
from pyshim.model.vm import LocalVm, VmConfig
from pyshim.resources.devices.plan.devices import is_enabled
from pyshim.resources.network.changes import NetworkChanges
from pyshim.resources.network.plan.direct import direct_network
from pyshim.resources.network.plan.network import HostsNetwork, vm_with_network
from pyshim.resources.network.port_forward import PortForward
from pyshim.resources.network.relay import GuestRelay
from pyshim.resources.network.resolver import Resolver
from pyshim.resources.services import SandboxServices, VmServices

MAX_DIRECT_FILE_BYTES = 1 << 20


class SandboxNetwork:
    def __init__(self, services: SandboxServices, connector: NetworkConnector) -> None:
        self.connected: Network | None = None
        """None for a pod without a network of its own."""
        self._plan = services.plan
        self._services = services
        self._connector = connector

    @traced("connect network")
    async def connect(self) -> None:
        plan, ledger = self._plan, self._services.ledger
        iommufd = isinstance(plan.vm, LocalVm) and plan.vm.guard is not None
        direct = await self._direct()
        if direct is not None:
            network = await self._connector.connect_direct(plan.netns_path, direct, ledger, iommufd=iommufd)
        elif plan.netns_path is None or plan.config.runtime.internetworking_model == NetworkModel.NONE:
            return
        else:
            is_empty = plan.new_netns and not plan.has_network_hooks
            connect = self._connector.connect_new if is_empty else self._connector.connect
            try:
                network = await connect(plan.netns_path, self._wiring(), ledger, iommufd=iommufd)
            except HostsNetwork as exc:
                if plan.kind is not ContainerKind.POD_SANDBOX:
                    raise
                # CRI-O says it by the path only. In the words of the pod's specification, as on containerd.
                raise HostsNetwork("hostNetwork is true") from exc
        self._services.undo.push(network.disconnect)
        self.connected = network

    @property
    def vm(self) -> VmConfig:
        """The VM as planned, with its network devices if they are connected. Raises what `vm_with_network` raises."""
        return self._plan.vm if self.connected is None else vm_with_network(self._plan, self.connected)

    @property
    def sysctls(self) -> Mapping[str, str]:
        """What was set in the namespace, for the guest's kernel, which gets it with each container."""
        return self.connected.sysctls if self.connected is not None else {}

    def _wiring(self) -> Wiring:
        config = self._plan.config
        hypervisor = config.hypervisor
        return Wiring(
            model=NetworkModel(config.runtime.internetworking_model),
            queues=hypervisor.network_queues or self._plan.vm.cpu.boot_vcpus,
            vhost_net=not hypervisor.disable_vhost_net,
            received_bits_s=hypervisor.rx_rate_limiter_max_rate,
            sent_bits_s=hypervisor.tx_rate_limiter_max_rate,
            pass_physical=hypervisor.cold_plug_vfio != "no-port",
        )

    async def _direct(self) -> DirectNetwork | None:
        """The devices that a file names for this sandbox, in place of the namespace's links; None without a file."""
        plan = self._plan
        path = f"{plan.config.runtime.dan_conf}/{plan.sandbox_id}.json"
        try:
            content = await self._services.host.read_bytes(path, MAX_DIRECT_FILE_BYTES)
        except NotFound:
            return None

        queues = plan.config.hypervisor.network_queues or 1
        direct = direct_network(content, path, sandbox_id=plan.sandbox_id, queues=queues)
        if direct.functions and not is_enabled(plan.config):
            address = next(iter(direct.functions.values()))
            raise FailedPrecondition(
                f"pass '{address}' of '{path}' through: cold_plug_vfio and hot_plug_vfio in '{plan.config.source}' are"
                ' "no-port"'
            )
        return direct

    def close_taps(self) -> None:
        """Our copies of the descriptors are closed; the VMM has its own. Idempotent."""
        if self.connected is not None:
            self.connected.close_taps()


class GuestNetwork:
    """The interfaces of one VM, and its guest's network."""

    def __init__(self, services: VmServices, network: SandboxNetwork) -> None:
        self._plan = services.plan
        self._services = services
        self._network = network
        self._forward: PortForward | None = None
        self._changes: NetworkChanges | None = None
        self._resolver: Resolver | None = None
        self._is_started = False
        """A container has been started in the pod."""
        self._plugged: dict[str, str] = {}
        """The guest's PCI path, by MAC, of each interface that came into the running VM by `plug`."""

    async def plug(self) -> None:
        """The interfaces are plugged into the running VM."""
        network = self._network.connected
        for nic in network.nics if network is not None else ():
            self._plugged[nic.mac] = (await self._services.vm_devices.plug(nic)).pci_path

    def close_taps(self) -> None:
        """As `SandboxNetwork.close_taps`."""
        self._network.close_taps()

    async def set_up(self, agent: Agent) -> None:
        """The guest has its interfaces, routes and neighbours."""
        network = self._network.connected
        if network is None:
            return
        paths = await self._paths(network)
        for interface in network.interfaces:
            await agent.update_interface(replace(interface, device_path=paths.get(interface.mac, "")))
        if network.routes:
            await agent.update_routes(network.routes)
        if network.neighbours:
            await agent.add_neighbours(network.neighbours)

    async def _paths(self, network: Network) -> dict[str, str]:
        """The guest's PCI path of each plugged interface and function, by MAC; functions that the VM did not boot with
        are plugged first.
        """
        placed = {item.device.id: item.pci_path for item in vm_with_network(self._plan, network).pci.placed}
        paths = dict(self._plugged)
        for mac, function in network.functions.items():
            if function.id not in placed:
                placed[function.id] = (await self._services.vm_devices.plug(function)).pci_path
            paths[mac] = placed[function.id]
        return paths

    def serve(self, agent: Agent) -> None:
        """The guest answers connections to the loopback of the pod's namespace, and gets interfaces that come later."""
        network = self._network.connected
        if network is None:
            return
        relay = GuestRelay(self._services, agent)
        if self._plan.new_netns:
            self._resolver = Resolver(self._services, connect=network.resolver, relay=relay, agent=agent)
            self._services.undo.push(self._resolver.close)
        if self._services.vm_devices.capabilities().network_hotplug:
            self._changes = NetworkChanges(self._services, network=network, resolver=self._resolver, agent=agent)
            self._changes.start()
            self._services.undo.push(self._changes.close)
        elif not self._plan.new_netns:
            network.unwatch()
        if network.forward_listener is not None:
            self._forward = PortForward(self._services, listener=network.forward_listener, relay=relay, agent=agent)
            self._forward.start()
            self._services.undo.push(self._forward.close)

    async def before_start(self) -> None:
        """Call before a container starts. The pod's first one finds what its caller has made of its network until now.

        That concerns a namespace of the shim's own: its caller adds interfaces between Create and Start, and may run a
        resolver in it. Raises ShimError for an interface that the guest cannot have.
        """
        network = self._network.connected
        if self._is_started or network is None or not self._plan.new_netns:
            return
        if self._changes is not None:
            await self._changes.catch_up()
        elif network.is_changed():
            network.unwatch()
            raise FailedPrecondition(
                f"connect the links of '{self._plan.netns_path}': they came after Create, and this VM takes no devices"
                ' while it runs (hint: machine_type "q35" with a default_bridges of 1)'
            )
        if self._resolver is not None:
            await self._resolver.follow()
        self._is_started = True

    def container_was_created(self, container_id: ContainerId) -> None:
        """The pod has this container now: unless it is the pause container, it may listen on ports."""
        pause = self._plan.kind is ContainerKind.POD_SANDBOX and str(container_id) == str(self._plan.sandbox_id)
        if self._forward is not None and not pause:
            self._forward.has_listeners = True
