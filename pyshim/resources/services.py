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
    on_change: Callable[[], None]
    """Called after each change that the persisted state must show."""

    def hold(self, *entries: LedgerEntry) -> None:
        """The entries are in the ledger; their resources are released at the sandbox's end."""
        self.undo.acquire(self.ledger, *entries)


class VmServices(SandboxServices, frozen=True, kw_only=True):
    """Those that the resources of one VM share: a sandbox has another VM if it boots after a clone that failed."""

    vm_devices: VmDevices

    @classmethod
    def of(cls, sandbox: SandboxServices, vm_devices: VmDevices) -> "VmServices":
        return cls(**{name: getattr(sandbox, name) for name in sandbox.__struct_fields__}, vm_devices=vm_devices)
