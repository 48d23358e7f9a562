"""The ledger's nouns: every host resource a sandbox holds, by kind and key (design rule: intent before effect).

An entry is written before the resource is made and struck out after it is gone, so that after a crash the ledger
names all that may exist. `cleanup/release.py` holds the one undo of each kind; every undo is idempotent.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Protocol

import msgspec


class ResourceKind(StrEnum):
    """Kinds in use; the comment names the key and the detail fields."""

    DIRECTORY = "directory"  # key: path; removed with all below it, never across a mount point
    SOCKET = "socket"  # key: path of a unix socket
    FILE = "file"  # key: path of a regular file; detail: sandbox, its id, for a file among a pod's volumes
    MOUNT = "mount"  # key: mount point; unmounted lazily, all layers of it; detail: beneath, a root a guest writes in
    PROCESS = "process"  # key: a text unique in its argv; detail: program; pid, start_ticks once known
    CGROUP = "cgroup"  # key: path in every hierarchy of detail roots (mount points, `:` between); alone: a directory
    LINK = "link"  # key: interface name; detail: netns path ("" = the host's), netns_inode
    INGRESS = "ingress"  # key: interface name whose ingress qdisc we added; detail: netns path, netns_inode
    QDISC = "qdisc"  # key: interface name whose root qdisc we added; detail: netns path, netns_inode
    NETNS = "netns"  # key: path of a namespace file we bound
    REMOTE_VM = "remote-vm"  # key: VM id; detail: socket of the remote hypervisor
    VFIO = "vfio"  # key: PCI address bound to vfio-pci; detail: former driver, former override if any


EXCLUSIVE = frozenset({ResourceKind.VFIO})
"""Kinds whose key is one thing of the node that one sandbox at a time may have, its shim alive or not: the undo of a
second one would take it from the first.
"""


class LedgerEntry(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    """`rename`: the state of a sandbox has entries under these names (`state/schema.py`)."""

    kind: ResourceKind
    key: str
    detail: Mapping[str, str | int] = msgspec.field(default_factory=dict)


class Ledger(Protocol):
    """The sandbox's ledger for the rooms that make host resources."""

    def acquire(self, *entries: LedgerEntry) -> None:
        """The intents are on disk, by one write; call before the first of the resources is made.

        The same kind and key replaces an entry. When this raises, none of them is held; FailedPrecondition for an
        exclusive one, which comes alone, that another sandbox has.
        """

    async def release(self, entry: LedgerEntry) -> None:
        """The resource is gone and struck out. Idempotent; raises ShimError when the undo fails (entry stays)."""
