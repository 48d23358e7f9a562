"""The services that the resources of one live sandbox share."""

from collections.abc import Callable

import msgspec

from pyshim.concurrency.tasks import TaskOwner
from pyshim.concurrency.undo import Undo
from pyshim.model.ledger import Ledger, LedgerEntry
from pyshim.model.plans import SandboxPlan
from pyshim.model.seams import Host
from pyshim.resources.devices.vm_devices import VmDevices


class SandboxServices(msgspec.Struct, frozen=True, kw_only=True):
    plan: SandboxPlan
    host: Host
    ledger: Ledger
    undo: Undo
    """Runs at the sandbox's end."""
    tasks: TaskOwner
    vm_devices: VmDevices
    on_change: Callable[[], None]
    """Called after each change that the persisted state must show."""

    def hold(self, *entries: LedgerEntry) -> None:
        """The entries are in the ledger; their resources are released at the sandbox's end."""
        self.undo.acquire(self.ledger, *entries)
