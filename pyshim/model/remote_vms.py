"""A remote VM: the requests to the service that makes it, and the ledger's record for its end.

The protocol has no call that reports the outcome of another one. StopVM by the VM's id is all there is, and a service
that answers "no such VM" while CreateVM is under way may still make the VM. So the entry says how far the VM had come.
"""

import re
from collections.abc import Mapping
from enum import StrEnum

import msgspec

from pyshim.model.ledger import LedgerEntry, ResourceKind

SERVICE = "hypervisor.Hypervisor"
"""The protocol's name on the wire."""
NOT_FOUND, UNKNOWN = 5, 2  # google.rpc.Code
MAX_REPLY_BYTES = 64 * 1024
"""Bytes of the largest reply: a service answers with a version, a path, or why it refuses. The shim decodes replies on
its event loop."""
_SHOWN_CHARS = 500


class RemoteServiceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The service that makes a VM, and what CreateVM says about the VM."""

    socket_path: str
    annotations: Mapping[str, str]
    """The whole description of the VM, besides its id and the pod's network namespace."""
    timeout_s: float
    """Seconds for CreateVM, and again for StartVM."""
    stop_timeout_s: float
    """Seconds for StopVM. The service deletes the VM within the call: a caller that gives up may leave it running."""


class RemoteVmState(StrEnum):
    ASKED = "asked"
    """CreateVM was about to be sent, or has been. Until its deadline has passed, "no such VM" proves nothing."""
    KNOWN = "known"
    """CreateVM has ended, and StartVM was not sent or was refused: "no such VM" means that there is none."""
    STARTED = "started"
    """StartVM was about to be sent, or has been, and was not refused. "No such VM" then says that the service has
    forgotten the VM; the VM may run on."""
    STOPPED = "stopped"
    """StopVM has been answered: nothing is left to be done."""
    LOST = "lost"
    """The service has forgotten a VM of the state `started`: its undo leaves a tombstone for a person."""


def remote_vm_entry(
    vm_id: str, *, socket_path: str, state: RemoteVmState, agent: str = "", asked_until_s: int, stop_timeout_s: int
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
    """A reply's status says that the service has no such VM.

    Cloud adaptors have no code for it, only the text `sandbox ID does not exist`. Other things may be missing (an
    instance's disk, a host's name), so the words must follow the id, and the id must be a whole word.
    """
    pattern = rf"(?<![\w.-]){re.escape(vm_id)}['\"]?:? (does not exist|not found|is not known)"
    return code == NOT_FOUND or (code == UNKNOWN and re.search(pattern, message) is not None)


def shown(words: str) -> str:
    """A service's text, fit for a log: cut, on one line, without control characters."""
    return "".join(char if char.isprintable() else " " for char in words[:_SHOWN_CHARS]).strip() or "(nothing)"
