"""Checks that an entry of a ledger read from disk can be its sandbox's, before anything is undone.

The state's checksum finds changes by a disk or an editor. This finds entries that no shim would have written,
whose undo would remove, unmount or end another sandbox's resources.
"""

import posixpath
import re
from collections.abc import Callable

from pyshim.cleanup.conventions import Places
from pyshim.model.errors import FailedPrecondition
from pyshim.model.ledger import LedgerEntry, ResourceKind
from pyshim.resources.cgroups.host.hierarchies import mounted

_MAX_LINK_CHARS = 15
"""IFNAMSIZ without its zero byte."""
_PCI_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_EMPTY_DIR_DISK = re.compile(r"/kubernetes\.io~empty-dir/[^/]+/disk\.img$")


def belongs_to(
    sandbox_id: str, places: Places, state_root: str, *, proc_root: str = "/proc"
) -> Callable[[LedgerEntry], None]:
    """A check that returns for an entry that can be the sandbox's, and raises FailedPrecondition for any other."""
    own = tuple(
        f"{root}/{sandbox_id}" for root in (places.vm_root, places.shared_root, state_root, places.metrics_root)
    )

    def check(entry: LedgerEntry) -> None:
        if problem := _problem(entry, sandbox_id, own, places, proc_root):
            raise FailedPrecondition(f"release {entry.kind.value} {entry.key!r}: {problem}, so it is left alone")

    return check


def is_foreign(entry: LedgerEntry, check: Callable[[LedgerEntry], None]) -> bool:
    """The check that `belongs_to` made refuses the entry: nothing will ever undo it."""
    try:
        check(entry)
    except FailedPrecondition:
        return True
    return False


def _problem(entry: LedgerEntry, sandbox_id: str, own: tuple[str, ...], places: Places, proc_root: str) -> str:
    """The reason why the entry cannot be the sandbox's, whose directories are `own`; empty when it can."""
    key = entry.key
    match entry.kind:
        case ResourceKind.VFIO:
            return "" if _PCI_ADDRESS.fullmatch(key) else "it is no PCI address"
        case ResourceKind.LINK | ResourceKind.INGRESS | ResourceKind.QDISC:
            return "" if _is_link_name(key) else "it is no name of an interface"
        case ResourceKind.REMOTE_VM:
            return "" if key and _is_plain(str(entry.detail.get("socket", ""))) else "it names no VM or no service"
        case ResourceKind.PROCESS:
            return "" if _is_plain(str(entry.detail.get("program", ""))) else "it names no program"
    if not _is_plain(key):
        return "it is no absolute, normalised path"
    is_own = any(key == top or key.startswith(f"{top}/") for top in own)
    match entry.kind:
        case ResourceKind.FILE if key.endswith(f"/{sandbox_id}") or _EMPTY_DIR_DISK.search(key):
            return ""
        case ResourceKind.MOUNT if "rootfs" in key.split("/"):  # of a container, in its bundle
            return ""
        case ResourceKind.NETNS if key.startswith(f"{places.netns_root}/"):
            return ""
        case ResourceKind.CGROUP:
            roots = str(entry.detail.get("roots", "")).split(":")
            tops = [posixpath.normpath(root + key) for root in roots]
            if all(_is_below(top, (places.cgroup_root,)) for top in tops):
                return ""
            hierarchies = tuple(each.mount_point for each in mounted(proc_root))
            return "" if all(_is_below(top, hierarchies) for top in tops) else "it is no cgroup"
    return "" if is_own else f"it is no place of sandbox {sandbox_id!r}"


def _is_below(path: str, tops: tuple[str, ...]) -> bool:
    return any(path.startswith(f"{top}/") for top in tops)


def _is_plain(path: str) -> bool:
    return path.startswith("/") and path != "/" and "\0" not in path and posixpath.normpath(path) == path


def _is_link_name(name: str) -> bool:
    return 0 < len(name) <= _MAX_LINK_CHARS and name not in (".", "..") and not re.search(r"[/\s\0]", name)
