"""A remote VM: the parameters of its service, and its ledger entry.

The protocol has no call that reports a VM's state. After a crash the only call left is StopVM with the VM's id, and a
service that answers "no such VM" while CreateVM is in progress may still make the VM. So the entry records how far the
VM's creation has come (`RemoteVmState`).
"""

import re
from collections.abc import Mapping
from enum import StrEnum

import msgspec

from pyshim.model.ledger import LedgerEntry, ResourceKind

SERVICE = "hypervisor.Hypervisor"
"""The ttrpc service's name."""
NOT_FOUND, UNKNOWN = 5, 2  # google.rpc.Code
MAX_REPLY_BYTES = 64 * 1024
"""The largest reply: it contains a version, a path or an error. The limit bounds the time that decoding blocks the
event loop."""
_SHOWN_CHARS = 500


class RemoteServiceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The service that makes the VM, and the VM's description."""

    socket_path: str
    annotations: Mapping[str, str]
    """The description that CreateVM sends, besides the VM's id and the pod's network namespace."""
    timeout_s: float
    """The deadline of CreateVM and of StartVM, each."""
    stop_timeout_s: float
    """The deadline of StopVM. The service deletes the VM within the call, so giving up early may leave a VM running."""


class RemoteVmState(StrEnum):
    ASKED = "asked"
    """CreateVM is about to be sent or was sent. The answer "no such VM" proves nothing before its deadline."""
    KNOWN = "known"
    """CreateVM has ended; StartVM was not sent or was refused. The answer "no such VM" is true."""
    STARTED = "started"
    """StartVM is about to be sent or was sent, and was not refused. After the answer "no such VM" the VM may still run:
    the service has lost track of it."""
    STOPPED = "stopped"
    """StopVM has been answered; there is nothing left to do."""
    LOST = "lost"
    """The service lost track of a VM in the state `started`. The undo leaves a record for the operator."""


def remote_vm_entry(
    vm_id: str, *, socket_path: str, state: RemoteVmState, agent: str = "", asked_until_s: int, stop_timeout_s: int
) -> LedgerEntry:
    """The VM's ledger entry. `asked_until_s` is the deadline of the last CreateVM or StartVM, in seconds since 1970."""
    detail: dict[str, str | int] = {
        "socket": socket_path,
        "state": state.value,
        "agent": agent,
        "asked_until_s": asked_until_s,
        "stop_timeout_s": stop_timeout_s,
    }
    return LedgerEntry(kind=ResourceKind.REMOTE_VM, key=vm_id, detail=detail)


def is_unknown_vm(vm_id: str, code: int, message: str) -> bool:
    """The status of a reply means that the service has no VM `vm_id`.

    Cloud adaptors have no code for it, only the text `sandbox ID does not exist`. As other things may be missing (a
    disk, a host name), the words must follow the id, and the id must be a whole word.
    """
    pattern = rf"(?<![\w.-]){re.escape(vm_id)}['\"]?:? (does not exist|not found|is not known)"
    return code == NOT_FOUND or (code == UNKNOWN and re.search(pattern, message) is not None)


def shown(text: str) -> str:
    """A service's text for a log: shortened, on one line, without control characters."""
    return "".join(char if char.isprintable() else " " for char in text[:_SHOWN_CHARS]).strip() or "(nothing)"
