"""persist.json to values and back: Kata's keys for its readers (`kata.py`), one key of ours, which alone is read back.

The classes here, those of `model/sandbox.py` and `LedgerEntry` are the format: a field without a default is a key that
must be there, further keys are ignored.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from pyshim.model.decoding import decoded
from pyshim.model.ids import SandboxId
from pyshim.model.ledger import LedgerEntry
from pyshim.model.sandbox import SandboxSnapshot
from pyshim.state.errors import NotOurState, StateDamaged, StateTooNew
from pyshim.state.kata import PERSIST_VERSION, kata_sandbox

KEY = "Pyshim"
VERSION = 4
OLDEST_VERSION = 3
"""Files of earlier versions have no checksum."""
CHECKSUM = "Checksum"
"""The last key below ours, and of the file: SHA-256 of every byte before it (`store.py`)."""


class ShimRecord(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    """The daemon that owns the sandbox: pid and start time identify it."""

    pid: int
    start_ticks: int
    socket: str
    """Address of its task service, as `start` printed it."""
    namespace: str
    pid_namespace: int = 0
    """Inode of the pid namespace in which `pid` means something; 0 where it is not known."""


class SandboxState(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    """The object under our key. `snapshot` is None until the sandbox has been planned."""

    version: int = VERSION
    sandbox_id: SandboxId = msgspec.field(name="SandboxID")
    shim: ShimRecord
    ledger: tuple[LedgerEntry, ...]
    """Sorted by acquisition; undone from the end."""
    snapshot: SandboxSnapshot | None


class _Document(msgspec.Struct, frozen=True, kw_only=True):
    own: SandboxState = msgspec.field(name=KEY)


class _Version(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    version: int


class _Versions(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    """The versions. They are read first, since they decide whether the rest can be read."""

    persist_version: int
    own: _Version = msgspec.field(name=KEY)


def document_of(state: SandboxState) -> dict[str, object]:
    """The file's content without the checksum, for msgspec to encode. Our key is the last."""
    return {**kata_sandbox(state.snapshot), KEY: state}


def state_from_json(document: Any, where: str, *, sealed: bool) -> SandboxState:
    """The state in `document`, read from `where`; not `sealed`: its text did not end in a checksum.

    Raises NotOurState without our key, StateTooNew for a later version, StateDamaged for one before checksums and for a
    wrong key, which it names.
    """

    def damaged(problem: str) -> StateDamaged:
        return StateDamaged(f"read state {where!r}: {problem}")

    if isinstance(document, Mapping) and KEY not in document:
        raise NotOurState(f"read state {where!r}: it was not written by pyshim")
    versions = decoded(document, _Versions, damaged)
    version, own_version = versions.persist_version, versions.own.version
    if version > PERSIST_VERSION or own_version > VERSION:
        raise StateTooNew(
            f"read state {where!r}: it has version {version}/{own_version}, this pyshim reads up to "
            f"{PERSIST_VERSION}/{VERSION}"
        )
    if own_version < OLDEST_VERSION:
        raise damaged(f"it has version {own_version}, and versions before {OLDEST_VERSION} have no checksum")
    if not sealed:
        raise damaged("it does not end in its checksum")
    if own_version < VERSION:
        try:
            document = {KEY: _from_version_3(document)}
        except (KeyError, TypeError, AttributeError) as error:
            raise damaged(f"not what version {own_version} wrote: {error!r}") from error
    return decoded(document, _Document, damaged).own


def _from_version_3(document: Any) -> Mapping[str, Any]:
    """Our object in a document of version 3, which had part of the snapshot under Kata's keys only."""
    own = document[KEY]
    if own["Snapshot"] is None:
        return {**own, "Version": VERSION}
    snapshot = {
        **own["Snapshot"],
        "SandboxID": own["SandboxID"],
        "Status": document["State"],
        "HypervisorConfig": document["Config"]["HypervisorConfig"],
        "Endpoints": document["Network"]["Endpoints"],
        "Devices": document["Devices"],
        "Owner": own["Snapshot"]["Owner"] or None,
    }
    return {**own, "Version": VERSION, "Snapshot": snapshot}
