"""The ledger lists the host resources of a sandbox by kind and key.

An entry is written before its resource is made and removed after the resource is gone. So after a crash the ledger
names every resource that may exist. `cleanup/undo.py` has the undo of each kind; every undo is idempotent.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Protocol

import msgspec


class ResourceKind(StrEnum):
    """The kinds of resources. Each comment has the key and the fields of `detail`."""

    DIRECTORY = "directory"  # key: path; removed with all below it, never across a mount point
    SOCKET = "socket"  # key: path of a unix socket
    FILE = "file"  # key: path of a regular file; detail: sandbox, its id, for a file among a pod's volumes
    MOUNT = "mount"  # key: mount point; all its mounts are undone, lazily; detail: beneath, a root a guest writes in
    PROCESS = "process"  # key: a text unique in its argv; detail: program; pid and start_ticks once known
    CGROUP = "cgroup"  # key: path below each of detail roots (mount points, `:` between); without roots: a directory
    LINK = "link"  # key: interface name; detail: netns path ("" = the host's), netns_inode, index once known
    INGRESS = "ingress"  # key: interface name to which an ingress qdisc was added; detail: as of a link
    QDISC = "qdisc"  # key: interface name to which a root qdisc was added; detail: as of a link
    NETNS = "netns"  # key: path of the file on which a namespace was bound
    REMOTE_VM = "remote-vm"  # key: VM id; detail: socket of the remote hypervisor
    VFIO = "vfio"  # key: PCI address bound to vfio-pci; detail: former driver, former override if any


EXCLUSIVE = frozenset({ResourceKind.VFIO})
"""Kinds whose resource only one sandbox of the node may have in its ledger, even when its shim is dead: the undo of a
second entry would take the resource from the first sandbox.
"""


class LedgerEntry(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    """`rename`: the field names of a sandbox's state file (`state/schema.py`)."""

    kind: ResourceKind
    key: str
    detail: Mapping[str, str | int] = msgspec.field(default_factory=dict)


class Ledger(Protocol):
    """The sandbox's ledger, for the rooms that make host resources."""

    def acquire(self, *entries: LedgerEntry) -> None:
        """Writes all entries to disk at once. Call it before the first of the resources is made.

        An entry replaces one of the same kind and key. On an error none of the entries is written. An entry of an
        EXCLUSIVE kind must be the only one; raises FailedPrecondition if another sandbox has it.
        """

    async def release(self, entry: LedgerEntry) -> None:
        """Undoes the resource and removes the entry. Idempotent; on failure raises ShimError and keeps the entry."""
