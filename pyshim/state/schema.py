"""What persist.json says, both ways: Kata's keys for its operators (`kata.py`), one key of ours for us.

Only our key is read back. It holds what Kata does not keep: the ledger, the sizing record, the agent's address, the
bundles and exits of the containers, and which shim it is.
"""

from collections.abc import Mapping

from pyshim.model.dataclasses import dataclass
from pyshim.model.errors import FailedPrecondition, Internal
from pyshim.model.ids import ContainerId, ExecId, HostPath, SandboxId
from pyshim.model.ledger import LedgerEntry, ResourceKind
from pyshim.model.snapshot import ContainerSnapshot, ExecSnapshot, SandboxSnapshot, SandboxStatus, StreamPositions
from pyshim.model.task import ExitStatus, Status, Stdio
from pyshim.state.json_fields import Fields, StateDamaged
from pyshim.state.kata import as_kata_sees, kata_sandbox
from pyshim.state.kata_shape import PERSIST_VERSION
from pyshim.state.migration import migrated

KEY = "Pyshim"
VERSION = 2


class StateTooNew(FailedPrecondition):
    """A later version wrote it; reading it by our rules could undo the wrong things."""


class NotOurState(Internal):
    """The file is another runtime's (Kata's own shim uses the same directory); it is none of our business."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShimRecord:
    """The daemon that owns the sandbox: pid and start time tell whether it still runs."""

    pid: int
    start_ticks: int
    socket: str
    """Address of its task service, as `start` printed it."""
    namespace: str
    pid_namespace: int = 0
    """Inode of the pid namespace in which `pid` means something; 0 where nobody noted it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxState:
    """All of one persist.json. `snapshot` is None until the sandbox has been planned."""

    sandbox_id: SandboxId
    shim: ShimRecord
    snapshot: SandboxSnapshot | None
    ledger: tuple[LedgerEntry, ...]
    """In the order of acquisition; undone from the end."""


def state_to_json(state: SandboxState) -> dict[str, object]:
    """The document; plain dicts, lists, strings and numbers."""
    own = {**head_to_json(state), "Snapshot": snapshot_to_json(state.snapshot)}
    return {**kata_to_json(state.snapshot), KEY: own}


def kata_to_json(snapshot: SandboxSnapshot | None) -> dict[str, object]:
    """The document without our key. Not told from the snapshot: what `as_kata_sees` leaves out."""
    if snapshot is None:
        return {"PersistVersion": PERSIST_VERSION, "State": ""}
    return kata_sandbox(as_kata_sees(snapshot))


def head_to_json(state: SandboxState) -> dict[str, object]:
    """What stands under our key but the snapshot."""
    return {
        "Version": VERSION,
        "SandboxID": state.sandbox_id,
        "Shim": shim_to_json(state.shim),
        "Ledger": [
            {"Kind": entry.kind.value, "Key": entry.key, "Detail": dict(entry.detail)} for entry in state.ledger
        ],
    }


def state_from_json(document: object, where: str) -> SandboxState:
    """The state in `document`, read from `where`.

    Raises NotOurState without our key, StateTooNew for a later version, StateDamaged naming the key that is wrong.
    """
    if isinstance(document, Mapping) and KEY not in document:
        raise NotOurState(f"read state {where!r}: it was not written by pyshim")
    top = Fields(document, where)
    version = top.number("PersistVersion")
    ours = top.child(KEY)
    own_version = ours.number("Version")
    if version > PERSIST_VERSION or own_version > VERSION:
        raise StateTooNew(
            f"read state {where!r}: it has version {version}/{own_version}, this pyshim reads up to "
            f"{PERSIST_VERSION}/{VERSION}"
        )
    if own_version < VERSION:
        top = Fields(migrated(document, KEY, own_version, where), where)
        ours = top.child(KEY)
    return SandboxState(
        sandbox_id=SandboxId(ours.text("SandboxID")),
        shim=shim_from_json(ours.child("Shim")),
        snapshot=None if ours.is_null("Snapshot") else _snapshot_from_json(ours, top),
        ledger=tuple(_entry_from_json(item) for item in ours.children("Ledger")),
    )


def shim_to_json(shim: ShimRecord) -> dict[str, object]:
    return {
        "Pid": shim.pid,
        "StartTicks": shim.start_ticks,
        "Socket": shim.socket,
        "Namespace": shim.namespace,
        "PidNamespace": shim.pid_namespace,
    }


def shim_from_json(item: Fields) -> ShimRecord:
    return ShimRecord(
        pid=item.number("Pid"),
        start_ticks=item.number("StartTicks"),
        socket=item.text("Socket"),
        namespace=item.text("Namespace"),
        pid_namespace=item.number("PidNamespace", 0),
    )


def _entry_from_json(item: Fields) -> LedgerEntry:
    kind = item.text("Kind")
    if kind not in ResourceKind._value2member_map_:
        raise StateDamaged(f"read state {item.where!r}: unknown kind {kind!r} of resource")
    detail = {
        name: value for name, value in item.child("Detail").items() if isinstance(value, str | int) and name != "Kind"
    }
    return LedgerEntry(kind=ResourceKind(kind), key=item.text("Key"), detail=detail)


def snapshot_to_json(snapshot: SandboxSnapshot | None) -> dict[str, object] | None:
    """What stands under `Snapshot` in our key: what Kata's keys do not already hold."""
    if snapshot is None:
        return None
    return {
        **sandbox_to_json(snapshot),
        "Containers": [
            {**container_to_json(container), "Execs": execs_to_json(container)} for container in snapshot.containers
        ],
    }


def sandbox_to_json(snapshot: SandboxSnapshot) -> dict[str, object]:
    """The snapshot without its containers."""
    return {
        "ConfigSource": snapshot.config_source,
        "HypervisorType": snapshot.hypervisor_type,
        "Hypervisor": dict(snapshot.hypervisor),
        "VmmPid": snapshot.vmm_pid,
        "AgentAddress": snapshot.agent_address,
        "NetnsPath": snapshot.netns_path,
        "Sizing": dict(snapshot.sizing),
        "Cgroups": dict(snapshot.cgroups),
        "Failure": snapshot.failure,
        "Owner": snapshot.owner or "",
        "SandboxConfig": dict(snapshot.sandbox_config),
        "Trace": dict(snapshot.trace),
    }


def _snapshot_from_json(ours: Fields, top: Fields) -> SandboxSnapshot:
    item = ours.child("Snapshot")
    status = top.text("State", "")
    if status not in SandboxStatus._value2member_map_:
        raise StateDamaged(f"read state {top.where!r}: unknown state {status!r}")
    config = top.child("Config", {})
    return SandboxSnapshot(
        sandbox_id=SandboxId(ours.text("SandboxID")),
        status=SandboxStatus(status),
        config_source=item.text("ConfigSource", ""),
        hypervisor_type=item.text("HypervisorType", ""),
        hypervisor=dict(item.child("Hypervisor").items()),
        hypervisor_config=dict(config.child("HypervisorConfig", {}).items()),
        vmm_pid=item.number("VmmPid", 0),
        agent_address=item.text("AgentAddress", ""),
        netns_path=item.text("NetnsPath", ""),
        sizing=dict(item.child("Sizing", {}).items()),
        containers=tuple(_container_from_json(container) for container in item.children("Containers")),
        failure=item.text("Failure", ""),
        cgroups=dict(item.child("Cgroups", {}).items()),
        owner=ContainerId(item.text("Owner")) if item.text("Owner") else None,
        endpoints=_objects(top.child("Network").children("Endpoints")),
        devices=_objects(top.children("Devices")),
        sandbox_config=dict(item.child("SandboxConfig").items()),
        trace=dict(item.child("Trace", {}).items()),
    )


def _objects(items: tuple[Fields, ...]) -> tuple[Mapping[str, object], ...]:
    return tuple(dict(item.items()) for item in items)


def container_to_json(container: ContainerSnapshot) -> dict[str, object]:
    """One container without its execs."""
    return {
        "ID": container.container_id,
        "Bundle": container.bundle,
        "Rootfs": container.rootfs,
        **_process_to_json(container),
        "Annotations": dict(container.annotations),
        "Resources": dict(container.resources),
        "DeviceMaps": [dict(item) for item in container.device_maps],
        "Mounts": [dict(item) for item in container.mounts],
    }


def execs_to_json(container: ContainerSnapshot) -> list[dict[str, object]]:
    return [
        {"ID": process.exec_id, **_process_to_json(process), "Spec": dict(process.spec)} for process in container.execs
    ]


def _process_to_json(process: ContainerSnapshot | ExecSnapshot) -> dict[str, object]:
    """What an init and an exec have in common."""
    stdio, end = process.stdio, process.exit
    return {
        "Status": process.status.name,
        "Stdio": {
            "Stdin": stdio.stdin,
            "Stdout": stdio.stdout,
            "Stderr": stdio.stderr,
            "Terminal": stdio.terminal,
        },
        "Exit": None if end is None else {"Status": end.status, "ExitedAtNs": end.exited_at_ns},
        "Moved": dict(zip(_STREAMS, process.moved, strict=True)),
    }


_STREAMS = ("Stdin", "Stdout", "Stderr")


def _container_from_json(item: Fields) -> ContainerSnapshot:
    return ContainerSnapshot(
        container_id=ContainerId(item.text("ID")),
        bundle=HostPath(item.text("Bundle")),
        status=_status(item),
        stdio=_stdio(item),
        exit=_exit(item),
        rootfs=HostPath(item.text("Rootfs", "")),
        moved=_moved(item),
        execs=tuple(
            ExecSnapshot(
                exec_id=ExecId(process.text("ID")),
                status=_status(process),
                stdio=_stdio(process),
                exit=_exit(process),
                moved=_moved(process),
                spec=dict(process.child("Spec").items()),
            )
            for process in item.children("Execs")
        ),
        annotations={name: item.child("Annotations").text(name) for name, _ in item.child("Annotations").items()},
        resources=dict(item.child("Resources").items()),
        device_maps=_objects(item.children("DeviceMaps")),
        mounts=_objects(item.children("Mounts")),
    )


def _status(item: Fields) -> Status:
    status = item.text("Status")
    if status not in Status.__members__:
        raise StateDamaged(f"read state {item.where!r}: unknown container status {status!r}")
    return Status[status]


def _stdio(item: Fields) -> Stdio:
    stdio = item.child("Stdio")
    return Stdio(
        stdin=stdio.text("Stdin"),
        stdout=stdio.text("Stdout"),
        stderr=stdio.text("Stderr"),
        terminal=stdio.truth("Terminal"),
    )


def _exit(item: Fields) -> ExitStatus | None:
    if item.is_null("Exit"):
        return None
    end = item.child("Exit")
    return ExitStatus(status=end.number("Status"), exited_at_ns=end.number("ExitedAtNs"))


def _moved(item: Fields) -> StreamPositions:
    moved = item.child("Moved")
    return StreamPositions(*(moved.number(stream) for stream in _STREAMS))
