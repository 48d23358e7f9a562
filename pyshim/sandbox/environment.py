"""What a pod is given: every neighbour it acts through, so that a test can give it others."""

from collections.abc import Awaitable, Callable, Mapping

from pyshim.model.capacity import CapacityFacts, CapacityQuestion
from pyshim.model.config import Config
from pyshim.model.dataclasses import dataclass
from pyshim.model.host_facts import HostFacts
from pyshim.model.ids import SandboxId
from pyshim.model.task import RuntimeOptions
from pyshim.sandbox.passed_devices import FindDevices, no_devices
from pyshim.sandbox.seams import (
    AgentConnector,
    Host,
    HypervisorFactory,
    Monitor,
    NetworkConnector,
    Publisher,
    Records,
    VolumeRpc,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The pod's neighbours, built once by the composition root."""

    host: Host
    load_config: Callable[[RuntimeOptions | None, Mapping[str, str]], Awaitable[Config]]
    host_facts: Callable[[], Awaitable[HostFacts]]
    capacity: Callable[[CapacityQuestion], Awaitable[CapacityFacts]]
    hypervisor_factory: HypervisorFactory
    connector_factory: Callable[[Config], AgentConnector]
    network_connector: NetworkConnector
    publisher: Publisher
    open_records: Callable[[SandboxId], Awaitable[Records]]
    clock_ns: Callable[[], int]
    new_uuid: Callable[[], str]
    open_monitor: Callable[[str, VolumeRpc], Awaitable[Monitor]]
    """Serves the monitor socket at the path. Raises ShimError."""
    find_devices: FindDevices = no_devices
    expect_sandbox: Callable[[], None] = lambda: None
    """Called as soon as one is asked for: what takes its time whatever it will be can begin."""
