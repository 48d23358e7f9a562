"""The mounts a container needs on the host before its guest hears of it."""

from pyshim.model.ledger import Ledger, LedgerEntry, ResourceKind
from pyshim.plan.container import ContainerPlan
from pyshim.sandbox.seams import Host
from pyshim.sandbox.undo import Undo


async def make_mounts(plan: ContainerPlan, *, host: Host, ledger: Ledger, undo: Undo) -> None:
    """The root file system and what the container shares are mounted; `undo` takes back whatever of it was begun."""
    undo.acquire(
        ledger,
        *(mount.intent() for mount in plan.rootfs_mounts),
        *(LedgerEntry(kind=ResourceKind.DIRECTORY, key=point) for point in plan.share_points),
        *(LedgerEntry(kind=ResourceKind.MOUNT, key=mount.target) for mount in plan.share_mounts),
    )
    for mount in (*plan.rootfs_mounts, *plan.share_mounts):
        await host.mount(mount)
