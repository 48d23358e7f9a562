"""Remote VMs that their service has forgotten: a tombstone for each, kept until a person strikes it.

A service that was restarted without its memory answers StopVM with "no such VM" while the VM may run on and cost money.
No call of the protocol can end such a VM, so its tombstone is for the person who looks in the cloud.
"""

import os
import time
from contextlib import suppress

import msgspec

from pyshim.host.files import replace_file
from pyshim.model.ids import checked_id
from pyshim.model.ledger import LedgerEntry

LOST_VMS = "/run/pyshim/lost-vms"
"""A file for each VM, named by its id. A reboot of the node removes them, as it removes the ledgers."""
_MAX_TOMBSTONE_BYTES = 64 << 10


class LostVm(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    service: str = ""
    """The service's socket."""
    agent: str = ""
    """The socket at which the VM's agent could be reached."""
    found_s: int = 0
    """When the service no longer knew the VM, by the time of the epoch."""


def bury(entry: LedgerEntry) -> None:
    """The VM of this ledger entry has a tombstone. Raises OSError, and InvalidArgument for an id that is no name."""
    name = checked_id(entry.key, "id of remote vm")
    os.makedirs(LOST_VMS, mode=0o700, exist_ok=True)
    stone = LostVm(
        id=entry.key,
        service=str(entry.detail.get("socket", "")),
        agent=str(entry.detail.get("agent", "")),
        found_s=int(time.time()),
    )
    content = msgspec.json.format(msgspec.json.encode(stone)) + b"\n"
    replace_file(f"{LOST_VMS}/{name}", content, mode=0o600, durable=False, many_writers=True)


def lost_vms() -> tuple[LostVm, ...]:
    """Every VM with a tombstone, by id. Of a tombstone that cannot be read the id is known. Raises OSError."""
    try:
        names = sorted(os.listdir(LOST_VMS))
    except FileNotFoundError:
        return ()
    return tuple(_read(name) for name in names if not name.startswith("."))


def _read(name: str) -> LostVm:
    with suppress(OSError, msgspec.MsgspecError), open(f"{LOST_VMS}/{name}", "rb") as file:
        return msgspec.structs.replace(msgspec.json.decode(file.read(_MAX_TOMBSTONE_BYTES), type=LostVm), id=name)
    return LostVm(id=name)


def strike(vm_id: str) -> bool:
    """The VM has no tombstone; False when it had none. Raises OSError, and InvalidArgument for what is no id."""
    try:
        os.unlink(f"{LOST_VMS}/{checked_id(vm_id, 'id of remote vm')}")
    except FileNotFoundError:
        return False
    return True
