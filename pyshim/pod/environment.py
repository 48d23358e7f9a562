"""The adapters that a pod acts through. Tests pass fakes."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

import msgspec

from hypervisors.base import Hypervisor
from pyshim.model.config import Config
from pyshim.model.host_facts import CapacityFacts, CapacityQuestion, HostFacts
from pyshim.model.ids import SandboxId
from pyshim.model.ledger import Ledger
from pyshim.model.observation import Trace
from pyshim.model.plans import SandboxPlan
from pyshim.model.seams import AgentConnector, Host, MonitorRpc, NetworkConnector, Publisher, Records
from pyshim.model.task import RuntimeOptions
from pyshim.resources.devices.live import FindDevices
from pyshim.resources.machine import ReadMachine
from pyshim.resources.placement_call import AskPlacement


class HypervisorFactory(Protocol):
    def __call__(self, ledger: Ledger, name: str) -> Hypervisor:
        """The driver of that name: `qemu` or `remote`."""


class ServeMonitor(Protocol):
    async def __call__(
        self, path: str, metrics_path: str, pod: MonitorRpc, *, debug: bool
    ) -> Callable[[], Awaitable[None]]:
        """Sockets answer at `path`, with `debug` also about the shim itself, and at `metrics_path`, which only reads.

        The result closes both. When this raises ShimError, neither is open.
        """


class ExportTrace(Protocol):
    def __call__(self, trace: Trace, endpoint: str, sandbox_id: SandboxId, annotations: Mapping[str, str]) -> None:
        """From now on the spans of `trace` are sent to the OTLP receiver at `endpoint`. Never waits, never raises."""


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """The pod's adapters, built once by the composition root."""

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
    serve_monitor: ServeMonitor
    read_machine: ReadMachine
    find_devices: FindDevices
    export_trace: ExportTrace
    ask_placement: AskPlacement
    give_up_after_start: Callable[[SandboxPlan], None]
    """The VM runs, and no other birth of it follows: the shim gives up what only a start needs. Raises ShimError."""
