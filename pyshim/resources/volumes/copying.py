"""Volumes where guest and host share no files: copied when a container needs them, and again when the kubelet rewrites
them.

One copy serves all containers of the pod. The agent can make and replace files but not remove them: a file that is gone
on the host is emptied in the guest, a link is left to dangle. The kubelet publishes a new version of a volume by
replacing one link, `..data`; so does the copy, after everything the link leads to is complete.
"""

import asyncio
import logging

from pyshim.concurrency.tasks import TaskOwner
from pyshim.concurrency.undo import Undo
from pyshim.model.errors import FailedPrecondition, ShimError
from pyshim.model.ids import GuestPath
from pyshim.model.plans import ContainerPlan
from pyshim.model.seams import ContainerAgent, Host
from pyshim.model.volumes import CopiedPiece, TreeEntry, VolumeCopy

log = logging.getLogger(__name__)

PIECE_BYTES = 1 << 20
FOLLOW_PAUSE_S = 2.0
"""Seconds between two looks at a volume that the kubelet rewrites: kata-agent's interval."""
_PARENT_MODE = 0o755
Tree = dict[str, TreeEntry]


class VolumeCopies:
    def __init__(self, *, host: Host, tasks: TaskOwner, follow_pause_s: float = FOLLOW_PAUSE_S) -> None:
        self._host = host
        self._tasks = tasks
        self._follow_pause_s = follow_pause_s
        self._copies: dict[GuestPath, _Copy] = {}

    async def attach(self, plan: ContainerPlan, agent: ContainerAgent, undo: Undo) -> None:
        """The guest has the container's copied volumes; `undo` detaches what was attached or begun."""
        for volume in plan.copies:
            undo.push(self.detach, volume, plan.container_id)
            await self.attach_one(volume, plan.container_id, agent)

    async def attach_one(self, volume: VolumeCopy, user: str, agent: ContainerAgent) -> None:
        """The guest has the volume's present content. A volume that `follows` is updated until its last user leaves.

        Raises ShimError naming it.
        """
        copy = self._copies.setdefault(volume.guest_path, _Copy(volume, self._host, agent))
        copy.users.add(user)
        await copy.update()
        if volume.follows and copy.follower is None:
            name = f"follow/{volume.guest_path.rpartition('/')[2]}"
            copy.follower = self._tasks.supervise(name, self._follow(copy))

    async def detach(self, volume: VolumeCopy, user: str) -> None:
        """`user` no longer has the volume; it is not followed after its last user. Idempotent."""
        copy = self._copies.get(volume.guest_path)
        if copy is None:
            return
        copy.users.discard(user)
        if not copy.users and copy.follower is not None:
            follower, copy.follower = copy.follower, None
            follower.cancel()
            await asyncio.wait([follower])

    async def _follow(self, copy: "_Copy") -> None:
        while True:
            await asyncio.sleep(self._follow_pause_s)
            try:
                await copy.update()
            except ShimError as exc:  # the kubelet was faster, or the guest has gone: retried at the next look
                log.debug("follow volume", extra={"source": copy.volume.source, "error": str(exc)})


class _Copy:
    """The guest's copy of one volume, for all containers that use it."""

    def __init__(self, volume: VolumeCopy, host: Host, agent: ContainerAgent) -> None:
        self.volume = volume
        self.users: set[str] = set()
        self.follower: asyncio.Task[None] | None = None
        self._host = host
        self._agent = agent
        self._there: Tree = {}
        """The entries that the guest has."""
        self._lock = asyncio.Lock()

    async def update(self) -> None:
        """The guest's copy is the host's tree; only what differs from the last time is sent."""
        async with self._lock:
            wanted = {entry.path: entry for entry in await self._host.list_tree(self.volume.source)}
            changed = [entry for path, entry in wanted.items() if self._there.get(path) != entry]
            if self._there and changed:
                log.info("volume changed", extra={"source": self.volume.source, "entries": len(changed)})
            for entry in _in_order(changed):
                self._there.pop(entry.path, None)  # the guest's copy is incomplete until sent
                await self._send(entry)
                self._there[entry.path] = entry
            for entry in _owners_again(changed, wanted):
                await self._send(entry)
            for entry in [entry for path, entry in self._there.items() if path not in wanted]:
                if not entry.is_link and not entry.is_directory:
                    await self._piece(entry, 0, 0, b"")  # the agent cannot remove a file, but empty it
                del self._there[entry.path]

    async def _send(self, entry: TreeEntry) -> None:
        if entry.is_link:
            target = entry.target.encode("utf-8", "surrogateescape")
            await self._piece(entry, len(target), 0, target)
        elif entry.is_directory or not entry.size_bytes:
            await self._piece(entry, 0, 0, b"")
        else:
            await self._send_content(entry)

    async def _send_content(self, entry: TreeEntry) -> None:
        offset = 0
        while offset < entry.size_bytes:
            length = min(PIECE_BYTES, entry.size_bytes - offset)
            data = await self._host.read_piece(self.volume.source, entry.path, offset, length)
            if len(data) < length:
                raise FailedPrecondition(
                    f"copy '{self.volume.source}/{entry.path}' into the guest: it became shorter meanwhile"
                )
            await self._piece(entry, entry.size_bytes, offset, data)
            offset += length

    async def _piece(self, entry: TreeEntry, size: int, offset: int, data: bytes) -> None:
        path = f"{self.volume.guest_path}/{entry.path}" if entry.path else self.volume.guest_path
        await self._agent.copy_file(
            CopiedPiece(
                path=GuestPath(path),
                file_size=size,
                file_mode=entry.mode,
                dir_mode=_PARENT_MODE,
                uid=entry.uid,
                gid=entry.gid,
                offset=offset,
                data=data,
            )
        )


def _in_order(entries: list[TreeEntry]) -> list[TreeEntry]:
    """Directories and files first; then links, the kubelet's own (`..data`) before the names that lead through it."""
    links = [entry for entry in entries if entry.is_link]
    links.sort(key=lambda entry: not entry.path.rpartition("/")[2].startswith(".."))
    return [*(entry for entry in entries if not entry.is_link), *links]


def _owners_again(changed: list[TreeEntry], wanted: Tree) -> list[TreeEntry]:
    """Directories that got an entry of another owner, which the agent may have made theirs. The deepest first."""
    parents = {}
    for entry in changed:
        parent = wanted.get(entry.path.rpartition("/")[0]) if entry.path else None
        if parent is not None and (entry.uid, entry.gid) != (parent.uid, parent.gid):
            parents[parent.path] = parent
    return sorted(parents.values(), key=lambda entry: -len(entry.path))
