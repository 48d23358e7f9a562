"""watchable-bind: an up-to-date copy of a directory or file of the share, because inotify does not work across
virtio-fs.

The target is a bind mount of the copy. A changed file is written beside the old one and renamed over it, so a reader
sees either the old or the new. Symlinks come after the files to which they point, and Kubernetes' `..data`, which
readers watch, last. Then files that have vanished from the source are removed. So a volume's update is as atomic in the
guest as on the host. A source that is a single file is rewritten in place: after a rename the bind mount would still
show the old one. Limits and interval are kata-agent's.
"""

from __future__ import annotations

import asyncio
import logging
import os
import stat

from guest.agent import mounts
from guest.agent.errors import InvalidArgument
from guest.agent.files import remove_tree

log = logging.getLogger(__name__)

WATCHABLE = "/run/kata-containers/shared/containers/watchable"
"""Where kata-agent's hosts want watched volumes: a directory of the share, read-only for the guest."""
_COPIES = "/run/kata-containers/watchable"
# kata-agent's interval in seconds, and its limits of what is copied: files, and bytes of all of them.
_EVERY_S = 2.0
_MAX_ENTRIES = 16
_MAX_BYTES = 1 << 20
# For a source that has grown since it was mounted. A mount can no longer replace the copy, so it is copied up to the
# size that Kubernetes allows for a ConfigMap.
_MAX_ENTRIES_LATER = 16_384
_MAX_BYTES_LATER = 4 << 20
_LAST = "..data"


class TooBig(Exception):
    """The source exceeds the limits."""


class Watches:
    """The volumes of the sandbox that are watched."""

    def __init__(self) -> None:
        self._watches: dict[str, tuple[str, asyncio.Task[None]]] = {}
        """The copy, and the task that updates it, by target."""

    def start(self, source: str, target: str) -> None:
        """`target` shows a copy of `source` that follows it. A source above the limits is bind mounted instead."""
        if not source.startswith("/"):
            raise InvalidArgument(f"watch {source!r}: not an absolute path")
        _make_room(target)
        os.makedirs(_COPIES, mode=0o700, exist_ok=True)
        copy = f"{_COPIES}/{len(self._watches)}-{os.getpid()}-{os.urandom(4).hex()}"
        try:
            seen = synchronize(source, copy, {})
        except TooBig as error:
            log.info("too big to watch, bind mounted", extra={"source": source, "cause": error})
            remove_tree(copy)
            mounts.make_target(source, target, "bind")
            mounts.mount(source, target, "bind", ["rbind"])
            return
        mounts.make_target(copy, target, "bind")
        mounts.mount(copy, target, "bind", ["bind"])
        task = asyncio.create_task(_follow(source, copy, seen), name=f"watch {source}")
        self._watches[target] = copy, task

    def stop(self, target: str) -> None:
        """The copy is no longer updated, and is unmounted and removed."""
        if target in self._watches:
            copy, task = self._watches.pop(target)
            task.cancel()
            mounts.unmount(target)
            remove_tree(copy)


def _make_room(target: str) -> None:
    """A target below WATCHABLE can be made: the directory is the guest's own tmpfs, as with kata-agent."""
    if target.startswith(f"{WATCHABLE}/") and mounts.mounted_type(WATCHABLE) != "tmpfs":
        os.makedirs(WATCHABLE, exist_ok=True)
        mounts.mount("tmpfs", WATCHABLE, "tmpfs", ["nosuid", "nodev", "mode=755"])


async def _follow(source: str, copy: str, seen: dict[str, tuple[int, ...]]) -> None:
    while True:
        await asyncio.sleep(_EVERY_S)
        try:
            seen = synchronize(source, copy, seen, later=True)
        except (OSError, TooBig) as error:
            # The host may be in the middle of an update: the next round sees its end.
            log.debug("not synchronized", extra={"source": source, "error": error})


def synchronize(
    source: str, copy: str, seen: dict[str, tuple[int, ...]], *, later: bool = False
) -> dict[str, tuple[int, ...]]:
    """`copy` is like `source`. `seen` is the last call's result: entries that have not changed since are not touched.

    Raises TooBig before anything is changed, OSError when the source changes meanwhile.
    """
    limits = (_MAX_ENTRIES_LATER, _MAX_BYTES_LATER) if later else (_MAX_ENTRIES, _MAX_BYTES)
    found = _scan(source, *limits)
    changed = {name for name, entry in found.items() if seen.get(name) != entry}
    if changed or len(found) != len(seen):
        for name in sorted(changed, key=lambda name: _order(name, found[name][0])):
            _copy_entry(_below(source, name), _below(copy, name), name)
        for name in sorted(set(seen) - set(found), reverse=True):
            remove_tree(_below(copy, name))
    return found


def _below(root: str, name: str) -> str:
    return os.path.join(root, name) if name else root


def _order(name: str, mode: int) -> tuple[int, str]:
    """Directories, parents first; files; symlinks; `..data`."""
    if stat.S_ISLNK(mode):
        return (3 if name == _LAST else 2, name)
    return (0 if stat.S_ISDIR(mode) else 1, name)


def _scan(root: str, max_entries: int, max_bytes: int) -> dict[str, tuple[int, ...]]:
    """Relative path ("" for the root) -> mode, owner, size, time and inode of everything that is copied."""
    found: dict[str, tuple[int, ...]] = {}
    waiting, files, size = [""], 0, 0
    while waiting:
        name = waiting.pop()
        path = _below(root, name)
        entry = os.stat(path) if not name else os.lstat(path)
        if stat.S_ISDIR(entry.st_mode):
            # A directory's time changes with its entries, which are compared anyway.
            found[name] = (entry.st_mode, entry.st_uid, entry.st_gid)
            waiting += [os.path.join(name, child) for child in os.listdir(path)]
        elif stat.S_ISREG(entry.st_mode) or stat.S_ISLNK(entry.st_mode):
            found[name] = (entry.st_mode, entry.st_uid, entry.st_gid, entry.st_size, entry.st_mtime_ns, entry.st_ino)
            files, size = files + 1, size + entry.st_size
        if files > max_entries or len(found) > 4 * max_entries or size > max_bytes:
            raise TooBig(f"more than {max_entries} files or {max_bytes} bytes")
    return found


def _copy_entry(source: str, copy: str, name: str) -> None:
    entry = os.lstat(source) if name else os.stat(source)
    if stat.S_ISDIR(entry.st_mode):
        if not os.path.isdir(copy) or os.path.islink(copy):
            remove_tree(copy)
            os.mkdir(copy, 0o700)
        os.chown(copy, entry.st_uid, entry.st_gid)
        os.chmod(copy, stat.S_IMODE(entry.st_mode))
        return
    part = f"{os.path.dirname(copy)}/.{os.path.basename(copy)}.part"[:4095] if name else copy
    if name:
        remove_tree(part)
    if stat.S_ISLNK(entry.st_mode):
        os.symlink(os.readlink(source), part)
    else:
        with open(source, "rb") as old, open(part, "wb") as new:
            new.write(old.read(_MAX_BYTES_LATER + 1))
            os.fchmod(new.fileno(), stat.S_IMODE(entry.st_mode))
    os.chown(part, entry.st_uid, entry.st_gid, follow_symlinks=False)
    if name:
        if os.path.isdir(copy) and not os.path.islink(copy):
            remove_tree(copy)
        os.rename(part, copy)
