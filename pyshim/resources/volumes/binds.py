"""The volumes in a sandbox's share. Each is bound once for all containers that have it, and unmounted with the last.

virtiofsd tells the files of two mounts apart. If a volume were bound for each container, the guest would have two files
for one of the host: a lock would exclude nobody in the other container, and a socket's or pipe's two ends never meet.
"""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AsyncExitStack
from weakref import WeakValueDictionary

from pyshim.concurrency.deadlines import CHANGE_S, MARGIN_S, within
from pyshim.concurrency.undo import Undo
from pyshim.model.ids import HostPath
from pyshim.model.ledger import Ledger, LedgerEntry, ResourceKind
from pyshim.model.seams import Host
from pyshim.model.volumes import Bind

log = logging.getLogger(__name__)


class Binds:
    def __init__(self, *, host: Host, ledger: Ledger) -> None:
        self._host = host
        self._ledger = ledger
        self._made: dict[HostPath, Bind] = {}
        self._users: dict[HostPath, set[str]] = {}
        """By target; also of a bind that is being made or could not be made."""
        # One per bind: a server that hangs delays only the containers with its volume.
        self._locks: WeakValueDictionary[HostPath, asyncio.Lock] = WeakValueDictionary()

    def all(self) -> tuple[Bind, ...]:
        """The binds that containers have."""
        return tuple(self._made.values())

    async def attach(self, binds: Sequence[Bind], user: str, undo: Undo) -> None:
        """The volumes are in the share until `undo`, which detaches them, has run for each of their users.

        Raises ShimError naming the mount that failed.
        """
        if not binds:
            return
        undo.push_for(CHANGE_S + MARGIN_S, self.detach, user)
        async with AsyncExitStack() as locks:
            for bind in sorted(binds, key=lambda bind: bind.mount.target):  # in one order, so that no two wait mutually
                await locks.enter_async_context(self._lock(bind.mount.target))
            new = [bind for bind in binds if bind.mount.target not in self._made]
            if new:
                self._ledger.acquire(*(entry for bind in new for entry in _entries(bind.mount.target)))
            for bind in binds:
                self._users.setdefault(bind.mount.target, set()).add(user)
            for bind in new:
                await self._host.mount(bind.mount)
                self._made[bind.mount.target] = bind

    async def detach(self, user: str) -> None:
        """`user` has no volume any more; a bind without users is unmounted. Idempotent.

        All are tried at the same time: the unmount of a dead server's file system takes seconds. Raises the first
        failure; the others are logged.
        """
        of_user = [target for target, users in self._users.items() if user in users]
        results = await asyncio.gather(*(self._leave(each, user) for each in of_user), return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        for failure in failures[1:]:
            log.warning("undo failed", extra={"of": f"volumes of '{user}'", "error": str(failure)})
        if failures:
            raise failures[0]

    async def _leave(self, target: HostPath, user: str) -> None:
        async with self._lock(target):
            users = self._users.get(target, set())
            if users == {user}:
                for entry in reversed(_entries(target)):
                    async with within(CHANGE_S, f"release {entry.kind.value} '{entry.key}'"):
                        await self._ledger.release(entry)
                self._made.pop(target, None)
                del self._users[target]
            users.discard(user)

    def _lock(self, target: HostPath) -> asyncio.Lock:
        return self._locks.setdefault(target, asyncio.Lock())


def _entries(target: HostPath) -> tuple[LedgerEntry, LedgerEntry]:
    """The mount point, which stays when the bind is unmounted, and the bind."""
    return LedgerEntry(kind=ResourceKind.DIRECTORY, key=target), LedgerEntry(kind=ResourceKind.MOUNT, key=target)
