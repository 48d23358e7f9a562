"""The mounts a container needs on the host before its guest hears of it."""

from pyshim.model.ledger import Ledger, LedgerEntry, ResourceKind
from pyshim.plan.container import ContainerPlan
from pyshim.sandbox.seams import Host
from pyshim.sandbox.undo import Undo


async def make_mounts(plan: ContainerPlan, *, host: Host, ledger: Ledger, undo: Undo) -> None:
    """The root file system and what the container shares are mounted; `undo` takes back whatever of it was begun."""
    for mount in plan.rootfs_mounts:
        undo.acquire(ledger, mount.intent())
        await host.mount(mount)
    for point in plan.share_points:
        undo.acquire(ledger, LedgerEntry(kind=ResourceKind.DIRECTORY, key=point))
    for mount in plan.share_mounts:
        undo.acquire(ledger, LedgerEntry(kind=ResourceKind.MOUNT, key=mount.target))
        await host.mount(mount)
