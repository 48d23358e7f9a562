"""persist.json to values and back: Kata's keys for its readers, and one key of ours, which alone is read back.

The classes here, those of `model/sandbox.py` and `LedgerEntry` are the format: a field without a default is a key that
must be there, further keys are ignored.

The readers of Kata's keys are `fetchSandbox` of Kata's Go runtime, with which its `delete` and `kata-runtime` begin,
and CSI drivers. A key that is not here has its zero value for them, as encoding/json of Go leaves it. The keys of Kata
4.x and their types are in `tests/unit/state/kata_shape.py`, against which tests check each file that is written.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from pyshim.model.decoding import decoded
from pyshim.model.errors import FailedPrecondition, Internal
from pyshim.model.ids import SandboxId
from pyshim.model.ledger import LedgerEntry
from pyshim.model.sandbox import ContainerSnapshot, SandboxSnapshot


class StateDamaged(Internal):
    """The file is not what we wrote: cut off, edited, or changed by the disk."""


class StateTooNew(FailedPrecondition):
    """A later version wrote the file, so that reading it by our rules could undo the wrong resources."""


class NotOurState(Internal):
    """Another runtime wrote the file: Kata's own shim uses the same directory. We leave it alone."""


PERSIST_VERSION = 2

_CONTAINER_STATES = {
    "CREATED": "ready",
    "RUNNING": "running",
    "PAUSED": "paused",
    "PAUSING": "running",
    "STOPPED": "stopped",
}
"""Kata's names of a container's state, by ours (`model/task.py`)."""


def kata_sandbox(snapshot: SandboxSnapshot | None) -> dict[str, object]:
    """The sandbox's document without our own key."""
    if snapshot is None:
        return {"PersistVersion": PERSIST_VERSION, "State": ""}
    containers = snapshot.containers
    return {
        "PersistVersion": PERSIST_VERSION,
        "State": snapshot.status,
        "SandboxContainer": containers[0].container_id if containers else "",
        "SandboxCgroupPath": _cgroup(snapshot, "sandbox"),
        "OverheadCgroupPath": _cgroup(snapshot, "overhead"),
        "Devices": snapshot.devices,
        "HypervisorState": _hypervisor_state(snapshot),
        "AgentState": {"URL": snapshot.agent_address},
        "Network": {"NetworkID": snapshot.netns_path, "Endpoints": snapshot.endpoints},
        "Config": {
            "HypervisorType": snapshot.hypervisor_type,
            "HypervisorConfig": snapshot.hypervisor_config,
            "KataAgentConfig": {"LongLiveConn": True},
            "ContainerConfigs": [_container_config(container) for container in containers],
            **snapshot.sandbox_config,
        },
    }


def kata_container(container: ContainerSnapshot, vmm_pid: int) -> dict[str, object]:
    """One container's document, for <sandbox>/<container>/persist.json."""
    return {
        "State": _CONTAINER_STATES.get(container.status.name, ""),
        "BundlePath": container.bundle,
        "Process": {"Token": container.container_id, "Pid": vmm_pid},
        "DeviceMaps": container.device_maps,
        "Mounts": container.mounts,
    }


def _container_config(container: ContainerSnapshot) -> dict[str, object]:
    return {
        "ID": container.container_id,
        "Annotations": container.annotations,
        "RootFs": container.rootfs,
        "Resources": container.resources,
    }


def _hypervisor_state(snapshot: SandboxSnapshot) -> dict[str, object]:
    """Kata's BlockIndexMap is a set of indices; under our own key it says which disk has which index."""
    known = {"Type": snapshot.hypervisor_type, "Pid": snapshot.vmm_pid, **snapshot.hypervisor}
    indices = known.get("BlockIndexMap")
    if isinstance(indices, dict):
        known["BlockIndexMap"] = {index: {} for index in indices}
    return known


def _cgroup(snapshot: SandboxSnapshot, role: str) -> str:
    groups = snapshot.cgroups.get("Groups", ())
    found = [group for group in groups if group["Role"] == role] if isinstance(groups, list) else []
    return str(found[0]["Path"]) if found else ""


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
    version: str = ""
    """Of pyshim; empty in states of 0.1.0."""


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
