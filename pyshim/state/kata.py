"""Kata's part of a persist.json: what its readers look up, under Kata's key names and with Kata's types.

The readers are `fetchSandbox` of Kata's Go runtime, with which its `delete` and `kata-runtime` begin, and CSI drivers.
A key that is not here has its zero value for them, as encoding/json of Go leaves it. The keys of Kata 4.x and their
types are in `tests/unit/state/kata_shape.py`, against which tests check each file that is written.
"""

from pyshim.model.sandbox import ContainerSnapshot, SandboxSnapshot

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
