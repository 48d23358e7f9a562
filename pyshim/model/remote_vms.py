"""A VM that a service makes elsewhere: what the service is told, and what the ledger knows for whoever has to end it.

The protocol has no way to ask what became of a call. StopVM by the VM's id is all there is, and a service that answers
"no such VM" may have it yet to make while CreateVM is under way; so the entry says how far things had come.
"""

import re
from collections.abc import Mapping
from enum import StrEnum

from pyshim.model.dataclasses import dataclass
from pyshim.model.ledger import LedgerEntry, ResourceKind

SERVICE = "hypervisor.Hypervisor"
"""The protocol's name on the wire."""
NOT_FOUND, UNKNOWN = 5, 2  # google.rpc.Code
_SHOWN_CHARS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteServiceConfig:
    """Who makes a VM that is not on this host, and what it is told of it."""

    socket_path: str
    annotations: Mapping[str, str]
    """The whole description of the VM: the service is told nothing else but its id and the pod's network namespace."""
    timeout_s: float
    """For making and for starting the VM, each."""
    stop_timeout_s: float
    """For its end. The service deletes the VM within the call, so that giving up early may leave it behind."""


class RemoteVmState(StrEnum):
    ASKED = "asked"
    """CreateVM was about to be sent, or has been. Until its deadline has passed, "no such VM" proves nothing."""
    KNOWN = "known"
    """CreateVM has ended, and what it did is done: "no such VM" means that it is gone."""
    STOPPED = "stopped"
    """StopVM has been answered: nothing is left to be done."""


def remote_vm_entry(
    vm_id: str,
    *,
    socket_path: str,
    state: RemoteVmState,
    agent: str = "",
    asked_until_s: int,
    stop_timeout_s: int,
) -> LedgerEntry:
    """`asked_until_s` is the time (of the epoch) by which the CreateVM or StartVM that was sent last has ended."""
    detail: dict[str, str | int] = {
        "socket": socket_path,
        "state": state.value,
        "agent": agent,
        "asked_until_s": asked_until_s,
        "stop_timeout_s": stop_timeout_s,
    }
    return LedgerEntry(kind=ResourceKind.REMOTE_VM, key=vm_id, detail=detail)


def is_unknown_vm(vm_id: str, code: int, message: str) -> bool:
    """A reply's status says that the service knows no such VM.

    Cloud adaptors have no code for it: `sandbox ID does not exist`. What else may be missing (an instance's disk, a
    host's name) must not be taken for it, so the words have to follow the id, and the id must be a whole one.
    """
    told = rf"(?<![\w.-]){re.escape(vm_id)}['\"]?:? (does not exist|not found|is not known)"
    return code == NOT_FOUND or (code == UNKNOWN and re.search(told, message) is not None)


def shown(words: str) -> str:
    """What a service said, fit for a log: cut, on one line, without control characters."""
    return "".join(char if char.isprintable() else " " for char in words[:_SHOWN_CHARS]).strip() or "(nothing)"
