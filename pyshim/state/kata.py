"""Kata's part of a persist.json, by Kata's key names, so that its operators and their tools find what they know.

Every key Kata writes is there, at its zero value where we have nothing to say. Source: kata-containers
src/runtime/virtcontainers/persist/api (PersistVersion 2).
"""

from collections.abc import Mapping

from pyshim.model.snapshot import ContainerSnapshot, SandboxSnapshot

PERSIST_VERSION = 2

_HYPERVISOR_STATE: Mapping[str, object] = {
    "BlockIndexMap": {},
    "Type": "",
    "UUID": "",
    "APISocket": "",
    "Bridges": [],
    "HotpluggedVCPUs": [],
    "HotpluggedMemory": 0,
    "VirtiofsDaemonPid": 0,
    "Pid": 0,
    "HotPlugVFIO": "",
    "ColdPlugVFIO": "",
    "PCIeRootPort": 0,
    "PCIeSwitchPort": 0,
}

_SANDBOX_CONFIG: Mapping[str, object] = {
    "KataShimConfig": {"Path": "", "Debug": False},
    "ShmSize": 0,
    "SharePidNs": False,
    "Stateful": False,
    "SystemdCgroup": False,
    "SandboxCgroupOnly": False,
    "DisableGuestSeccomp": False,
    "EnableVCPUsPinning": False,
    "SandboxBindMounts": [],
    "Experimental": [],
    "GuestSeLinuxLabel": "",
    "cgroups": None,
}


def kata_sandbox(snapshot: SandboxSnapshot) -> dict[str, object]:
    """The sandbox's document without our own key."""
    containers = snapshot.containers
    return {
        "PersistVersion": PERSIST_VERSION,
        "State": snapshot.status.value,
        "SandboxContainer": containers[0].container_id if containers else "",
        "GuestMemoryBlockSizeMB": 0,
        "GuestMemoryHotplugProbe": False,
        "SandboxCgroupPath": _cgroup(snapshot, "sandbox"),
        "OverheadCgroupPath": _cgroup(snapshot, "overhead"),
        "CgroupPaths": {},
        "Devices": [],
        "HypervisorState": {
            **_HYPERVISOR_STATE,
            "Type": snapshot.hypervisor_type,
            "Pid": snapshot.vmm_pid,
            **snapshot.hypervisor,
        },
        "AgentState": {"URL": snapshot.agent_address},
        "Network": {"NetworkID": snapshot.netns_path, "Endpoints": [], "NetworkCreated": False},
        "Config": {
            **_SANDBOX_CONFIG,
            "SandboxCgroupOnly": snapshot.cgroups.get("SandboxCgroupOnly", False),
            "HypervisorType": snapshot.hypervisor_type,
            "HypervisorConfig": dict(snapshot.hypervisor_config),
            "KataAgentConfig": {"LongLiveConn": True},
            "NetworkConfig": {
                "NetworkID": snapshot.netns_path,
                "NetworkCreated": False,
                "DisableNewNetwork": not snapshot.netns_path,
                "InterworkingModel": 0,
            },
            "ContainerConfigs": [
                {"ID": container.container_id, "Annotations": {}, "RootFs": container.rootfs, "Resources": {}}
                for container in containers
            ],
        },
    }


def _cgroup(snapshot: SandboxSnapshot, role: str) -> str:
    groups = snapshot.cgroups.get("Groups", ())
    found = [group for group in groups if group["Role"] == role] if isinstance(groups, list) else []
    return str(found[0]["Path"]) if found else ""


def kata_container(container: ContainerSnapshot, vmm_pid: int) -> dict[str, object]:
    """One container's document, for <sandbox>/<container>/persist.json."""
    return {
        "State": _CONTAINER_STATES.get(container.status.name, ""),
        "Rootfs": {"BlockDeviceID": "", "FsType": ""},
        "CgroupPath": "",
        "DeviceMaps": [],
        "Mounts": [],
        "Process": {"Token": container.container_id, "Pid": vmm_pid, "StartTime": ""},
        "BundlePath": container.bundle,
    }


# Kata's words for a container's state, by our status names (model/task.py).
_CONTAINER_STATES = {
    "CREATED": "ready",
    "RUNNING": "running",
    "PAUSED": "paused",
    "PAUSING": "running",
    "STOPPED": "stopped",
}
