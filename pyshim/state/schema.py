"""persist.json to values and back: Kata's keys for its operators (`kata.py`), one key of ours for us.

Our key is read back, and of Kata's keys those of `_Kata`. Ours holds what Kata does not keep: the ledger, the sizing
record, the agent's address, the bundles and exits of the containers, and which shim it is. The classes here, and those
of `model/snapshot.py`, are the format: a field without a default is a key that must be there, further keys are ignored.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import asdict

from pyshim.model.decoding import decoded
from pyshim.model.ids import ContainerId, SandboxId
from pyshim.model.ledger import LedgerEntry, ResourceKind
from pyshim.model.snapshot import ContainerSnapshot, SandboxSnapshot, SandboxStatus
from pyshim.state.errors import NotOurState, StateDamaged, StateTooNew
from pyshim.state.kata import as_kata_sees, kata_sandbox
from pyshim.state.kata_shape import PERSIST_VERSION
from pyshim.state.migration import migrated

KEY = "Pyshim"
VERSION = 3
CHECKSUM = "Checksum"
"""The last key below ours, and of the file: SHA-256 of every byte before it (`store.py`)."""
_SEALED_SINCE = 3


class ShimRecord(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    """The daemon that owns the sandbox: pid and start time tell whether it still runs."""

    pid: int
    start_ticks: int
    socket: str
    """Address of its task service, as `start` printed it."""
    namespace: str
    pid_namespace: int = 0
    """Inode of the pid namespace in which `pid` means something; 0 where it is not known."""


class SandboxState(msgspec.Struct, frozen=True, kw_only=True):
    """All of one persist.json. `snapshot` is None until the sandbox has been planned."""

    sandbox_id: SandboxId
    shim: ShimRecord
    snapshot: SandboxSnapshot | None
    ledger: tuple[LedgerEntry, ...]
    """In the order of acquisition; undone from the end."""


class _Entry(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    kind: ResourceKind
    key: str
    detail: Mapping[str, Any]


class _Snapshot(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    """The fields of a snapshot that Kata's keys do not hold."""

    config_source: str = ""
    hypervisor_type: str = ""
    hypervisor: Mapping[str, object]
    vmm_pid: int = 0
    agent_address: str = ""
    netns_path: str = ""
    sizing: Mapping[str, object] = msgspec.field(default_factory=dict)
    cgroups: Mapping[str, object] = msgspec.field(default_factory=dict)
    failure: str = ""
    owner: str
    """Empty for none."""
    sandbox_config: Mapping[str, object]
    trace: Mapping[str, object] = msgspec.field(default_factory=dict)
    containers: tuple[ContainerSnapshot, ...]


class _Own(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    """What stands under our key."""

    sandbox_id: SandboxId = msgspec.field(name="SandboxID")
    shim: ShimRecord
    ledger: tuple[_Entry, ...]
    snapshot: _Snapshot | None = None


class _Document(msgspec.Struct, frozen=True, kw_only=True):
    own: _Own = msgspec.field(name=KEY)


class _Version(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    version: int


class _Versions(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    """The versions, read first: they say whether the rest may be read."""

    persist_version: int
    own: _Version = msgspec.field(name=KEY)


class _HypervisorConfig(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    hypervisor_config: Mapping[str, object] = msgspec.field(default_factory=dict)


class _Network(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    endpoints: tuple[Mapping[str, object], ...]


class _Kata(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    """Those of Kata's keys that a snapshot is made of."""

    state: SandboxStatus = SandboxStatus.CREATING
    config: _HypervisorConfig = _HypervisorConfig()
    network: _Network
    devices: tuple[Mapping[str, object], ...]


def kata_to_json(snapshot: SandboxSnapshot | None) -> dict[str, object]:
    """The document without our key; it lacks what `as_kata_sees` leaves out of the snapshot."""
    if snapshot is None:
        return {"PersistVersion": PERSIST_VERSION, "State": ""}
    return kata_sandbox(as_kata_sees(snapshot))


def head_to_json(state: SandboxState) -> dict[str, object]:
    """What stands under our key, without the snapshot."""
    ledger = [_Entry(kind=entry.kind, key=entry.key, detail=entry.detail) for entry in state.ledger]
    return {
        "Version": VERSION,
        "SandboxID": state.sandbox_id,
        "Shim": msgspec.to_builtins(state.shim),
        "Ledger": msgspec.to_builtins(ledger),
    }


def sandbox_to_json(snapshot: SandboxSnapshot) -> dict[str, object]:
    """What stands under `Snapshot` in our key, without the containers."""
    own = {key: getattr(snapshot, name) for name, key in _OWN_KEYS}
    document: dict[str, object] = msgspec.to_builtins({**own, "Owner": snapshot.owner or ""})
    return document


_OWN_KEYS = tuple(
    (name, key)
    for name, key in zip(_Snapshot.__struct_fields__, _Snapshot.__struct_encode_fields__, strict=True)
    if name != "containers"
)


def container_to_json(container: ContainerSnapshot) -> dict[str, object]:
    """One container without its execs."""
    document: dict[str, object] = msgspec.to_builtins(container)
    del document["Execs"]
    return document


def execs_to_json(container: ContainerSnapshot) -> list[dict[str, object]]:
    execs: list[dict[str, object]] = msgspec.to_builtins(container.execs)
    return execs


def state_from_json(document: object, where: str, *, sealed: bool = True) -> SandboxState:
    """The state in `document`, read from `where`; not `sealed`: its text did not end in a checksum.

    Raises NotOurState without our key, StateTooNew for a later version, StateDamaged naming the key that is wrong.
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
    if not sealed and (own_version >= _SEALED_SINCE or _has_checksum(document)):
        raise damaged("it does not end in its checksum")
    if own_version < VERSION:
        document = migrated(document, KEY, own_version, where)
    own = decoded(document, _Document, damaged).own
    snapshot = None
    if own.snapshot is not None:
        snapshot = _snapshot(own.sandbox_id, own.snapshot, decoded(document, _Kata, damaged))
    return SandboxState(
        sandbox_id=own.sandbox_id, shim=own.shim, snapshot=snapshot, ledger=tuple(map(_ledger_entry, own.ledger))
    )


def _has_checksum(document: object) -> bool:
    """A newer version wrote the document, whatever its version says now."""
    own = document.get(KEY) if isinstance(document, Mapping) else None
    return isinstance(own, Mapping) and CHECKSUM in own


def _ledger_entry(entry: _Entry) -> LedgerEntry:
    """The entry, without values that no detail can have."""
    known = {name: value for name, value in entry.detail.items() if isinstance(value, str | int) and name != "Kind"}
    return LedgerEntry(kind=entry.kind, key=entry.key, detail=known)


def _snapshot(sandbox_id: SandboxId, own: _Snapshot, kata: _Kata) -> SandboxSnapshot:
    told = {**asdict(own), "owner": ContainerId(own.owner) if own.owner else None}
    return SandboxSnapshot(
        sandbox_id=sandbox_id,
        status=kata.state,
        hypervisor_config=kata.config.hypervisor_config,
        endpoints=kata.network.endpoints,
        devices=kata.devices,
        **told,
    )
