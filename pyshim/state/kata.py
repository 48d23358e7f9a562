"""Kata's part of a persist.json, under Kata's key names, so that its operators and their tools find what they know.

Every key that Kata writes is there (`kata_shape.py`), with its zero value where it has no meaning here.
"""

from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any

import msgspec
from msgspec.structs import replace

from pyshim.model.snapshot import NOTHING_MOVED, ContainerSnapshot, SandboxSnapshot
from pyshim.state.errors import StateDamaged
from pyshim.state.kata_shape import (
    CONTAINER_STATE,
    DEVICE_STATE,
    ENDPOINT,
    HYPERVISOR_CONFIG,
    HYPERVISOR_STATE,
    PERSIST_VERSION,
    SANDBOX_STATE,
    filled,
    zero,
)

_UNTOLD: dict[str, Any] = {"config_source": "", "sizing": {}, "failure": "", "owner": None, "trace": {}}
_UNTOLD_OF_CONTAINER: dict[str, Any] = {"execs": (), "moved": NOTHING_MOVED, "exit": None}
"""The fields that no key of Kata's holds, with the values that leave them out of Kata's documents."""


def fields_of(kind: type[msgspec.Struct], *, without: Iterable[str]) -> Callable[[Any], tuple[object, ...]]:
    """A function that returns the fields of a value of class `kind`, without some of them."""
    return attrgetter(*(name for name in kind.__struct_fields__ if name not in without))


_TOLD = fields_of(SandboxSnapshot, without=(*_UNTOLD, "containers"))
told_of_container = fields_of(ContainerSnapshot, without=_UNTOLD_OF_CONTAINER)


def completed(snapshot: SandboxSnapshot) -> SandboxSnapshot:
    """The snapshot as a reader gets it back: every object of Kata's has all its keys."""
    return replace(
        snapshot,
        hypervisor_config=_object(snapshot.hypervisor_config, HYPERVISOR_CONFIG),
        endpoints=tuple(_object(endpoint, ENDPOINT) for endpoint in snapshot.endpoints),
        devices=tuple(_object(device, DEVICE_STATE) for device in snapshot.devices),
    )


def as_kata_sees(snapshot: SandboxSnapshot) -> SandboxSnapshot:
    """The snapshot without the fields that no key of Kata's holds."""
    return replace(snapshot, containers=tuple(map(container_as_kata_sees, snapshot.containers)), **_UNTOLD)


def container_as_kata_sees(container: ContainerSnapshot) -> ContainerSnapshot:
    """The same of one container."""
    return replace(container, **_UNTOLD_OF_CONTAINER)


def told(snapshot: SandboxSnapshot) -> tuple[object, ...]:
    """The fields of the snapshot that Kata's keys hold: equal fields give equal documents.

    An exec that starts and ends changes none of them.
    """
    return (*_TOLD(snapshot), *map(told_of_container, snapshot.containers))


def _hypervisor(snapshot: SandboxSnapshot) -> dict[str, Any]:
    """Kata's BlockIndexMap is a set of indices; our own key holds which disk has which index."""
    known = {"Type": snapshot.hypervisor_type, "Pid": snapshot.vmm_pid, **snapshot.hypervisor}
    indices = known.get("BlockIndexMap")
    if isinstance(indices, Mapping):
        known["BlockIndexMap"] = {index: {} for index in indices}
    return _object(known, HYPERVISOR_STATE)


def _object(value: Mapping[str, object], shape: Mapping[str, object]) -> dict[str, Any]:
    """`value` with all keys of `shape`; unchanged when something in it has another type, since it must be written."""
    try:
        return filled(value, shape, "")  # type: ignore[return-value]
    except StateDamaged:
        return dict(value)


def kata_sandbox(snapshot: SandboxSnapshot) -> dict[str, Any]:
    """The sandbox's document without our own key."""
    containers = snapshot.containers
    # Copies, so that the table of shapes stays what it is.
    document: dict[str, Any] = zero(SANDBOX_STATE)  # type: ignore[assignment]
    config = document["Config"]
    document.update(
        PersistVersion=PERSIST_VERSION,
        State=snapshot.status.value,
        SandboxContainer=containers[0].container_id if containers else "",
        SandboxCgroupPath=_cgroup(snapshot, "sandbox"),
        OverheadCgroupPath=_cgroup(snapshot, "overhead"),
        Devices=[_object(device, DEVICE_STATE) for device in snapshot.devices],
        HypervisorState=_hypervisor(snapshot),
        AgentState={"URL": snapshot.agent_address},
        Network={
            "NetworkID": snapshot.netns_path,
            "Endpoints": [_object(endpoint, ENDPOINT) for endpoint in snapshot.endpoints],
            "NetworkCreated": False,
        },
    )
    config.update(
        HypervisorType=snapshot.hypervisor_type,
        HypervisorConfig=_object(snapshot.hypervisor_config, HYPERVISOR_CONFIG),
        KataAgentConfig={"LongLiveConn": True},
        KataShimConfig={"Path": "", "Debug": False},
        NetworkConfig={
            "NetworkID": snapshot.netns_path,
            "NetworkCreated": False,
            "DisableNewNetwork": not snapshot.netns_path,
            "InterworkingModel": 0,
        },
        ContainerConfigs=[
            {
                "ID": container.container_id,
                "Annotations": dict(container.annotations),
                "RootFs": container.rootfs,
                "Resources": dict(container.resources),
            }
            for container in containers
        ],
    )
    config.update(snapshot.sandbox_config)
    if "SandboxCgroupOnly" in snapshot.cgroups:
        config["SandboxCgroupOnly"] = snapshot.cgroups["SandboxCgroupOnly"]
    return document


def _cgroup(snapshot: SandboxSnapshot, role: str) -> str:
    groups = snapshot.cgroups.get("Groups", ())
    found = [group for group in groups if group["Role"] == role] if isinstance(groups, list) else []
    return str(found[0]["Path"]) if found else ""


def kata_container(container: ContainerSnapshot, vmm_pid: int) -> dict[str, Any]:
    """One container's document, for <sandbox>/<container>/persist.json."""
    document: dict[str, Any] = zero(CONTAINER_STATE)  # type: ignore[assignment]
    document.update(
        State=_CONTAINER_STATES.get(container.status.name, ""),
        Process={**document["Process"], "Token": container.container_id, "Pid": vmm_pid},
        BundlePath=container.bundle,
        DeviceMaps=list(container.device_maps),
        Mounts=list(container.mounts),
    )
    return _object(document, CONTAINER_STATE)


def kata_from_json(document: object, where: str) -> dict[str, Any]:
    """A sandbox's document that Kata's own runtime wrote, complete: a key it left out is there at its zero value.

    Raises StateDamaged naming the key that is wrong.
    """
    return _from_json(document, SANDBOX_STATE, where)


def kata_container_from_json(document: object, where: str) -> dict[str, Any]:
    """The same for a container's document."""
    return _from_json(document, CONTAINER_STATE, where)


def _from_json(document: object, shape: Mapping[str, object], where: str) -> dict[str, Any]:
    try:
        return filled(document, shape, "")  # type: ignore[return-value]
    except StateDamaged as error:
        raise StateDamaged(f"{error} ({where})") from error


# Kata's words for a container's state, by our status names (model/task.py).
_CONTAINER_STATES = {
    "CREATED": "ready",
    "RUNNING": "running",
    "PAUSED": "paused",
    "PAUSING": "running",
    "STOPPED": "stopped",
}
