"""Remote VMs that their service has forgotten: a tombstone for each, until a person removes it.

A service that was restarted without its memory answers StopVM with "no such VM" while the VM may run on and cost money.
No call of the protocol can end such a VM, so its tombstone is for the person who looks in the cloud.
"""

import os
import time
from contextlib import suppress

import msgspec

from pyshim.host.files import replace_file
from pyshim.model.decoding import damaged, from_json
from pyshim.model.errors import InvalidArgument
from pyshim.model.ids import checked_id
from pyshim.model.ledger import LedgerEntry
from pyshim.model.places import LOST_VMS

_MAX_TOMBSTONE_BYTES = 64 << 10


class LostVm(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    service: str = ""
    """The service's socket."""
    agent: str = ""
    """The socket at which the VM's agent could be reached."""
    found_s: int = 0
    """When the service no longer knew the VM, by the time of the epoch."""


def write_tombstone(entry: LedgerEntry) -> None:
    """The VM of this ledger entry has a tombstone. Raises OSError; InvalidArgument for an id that cannot be a name."""
    name = checked_id(entry.key, "id of remote vm")
    os.makedirs(LOST_VMS, mode=0o700, exist_ok=True)
    tombstone = LostVm(
        id=entry.key,
        service=str(entry.detail.get("socket", "")),
        agent=str(entry.detail.get("agent", "")),
        found_s=int(time.time()),
    )
    content = msgspec.json.format(msgspec.json.encode(tombstone)) + b"\n"
    replace_file(f"{LOST_VMS}/{name}", content, mode=0o600, durable=False, many_writers=True)


def lost_vms() -> tuple[LostVm, ...]:
    """Every VM with a tombstone, by id; of one that cannot be read only the id is given. Raises OSError."""
    try:
        names = sorted(os.listdir(LOST_VMS))
    except FileNotFoundError:
        return ()
    return tuple(_read(name) for name in names if not name.startswith("."))


def _read(name: str) -> LostVm:
    path = f"{LOST_VMS}/{name}"
    with suppress(OSError, InvalidArgument), open(path, "rb") as file:
        return msgspec.structs.replace(from_json(file.read(_MAX_TOMBSTONE_BYTES), LostVm, damaged(path)), id=name)
    return LostVm(id=name)


def remove_tombstone(vm_id: str) -> bool:
    """The tombstone of the VM is gone; False when there was none. Raises OSError; InvalidArgument for a wrong id."""
    try:
        os.unlink(f"{LOST_VMS}/{checked_id(vm_id, 'id of remote vm')}")
    except FileNotFoundError:
        return False
    return True
