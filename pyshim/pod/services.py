"""The neighbours of a container and its processes, and the listener of sandbox and containers."""

from collections.abc import Callable
from typing import Protocol

import msgspec

from pyshim.concurrency.tasks import TaskOwner
from pyshim.model.ids import ContainerId
from pyshim.model.ledger import Ledger
from pyshim.model.seams import ContainerAgent, Host, Publisher
from pyshim.model.vm import GuestNode
from pyshim.resources.devices.live import ContainerDevices
from pyshim.resources.sizing.live import Resizer
from pyshim.resources.sizing.swap import GuestSwap
from pyshim.resources.volumes.attachments import Attachments


class ContainerServices(msgspec.Struct, frozen=True, kw_only=True):
    """The neighbours of a container, and the resources of its sandbox that it shares."""

    namespace: str
    """containerd's, for log programs."""
    agent: ContainerAgent
    host: Host
    ledger: Ledger
    attachments: Attachments
    devices: ContainerDevices
    resizer: Resizer
    swap: GuestSwap
    nodes: tuple[GuestNode, ...]
    """The guest's NUMA nodes, if it has several."""
    publisher: Publisher
    tasks: TaskOwner
    clock_ns: Callable[[], int]


class PodListener(Protocol):
    """The pod, as its sandbox and containers call it after a change; never raises."""

    def changed(self) -> None: ...
    def init_started(self) -> None: ...
    def init_exited(self, container_id: ContainerId, *, agent_gone: bool) -> None: ...
    def sandbox_lost(self, reason: str) -> None:
        """Called once, unless the sandbox was asked to stop."""

    def container_met_oom(self, container_id: str) -> None: ...
