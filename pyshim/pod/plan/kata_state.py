"""Plans as the objects of Kata's state file: Mount, DeviceMap, DeviceState, Endpoint and SandboxConfig. Pure.

Keys with a zero value may be left out.
"""

import posixpath
from collections.abc import Mapping
from typing import Any

from pyshim.model.guest import NetworkInterface
from pyshim.model.ids import GuestPath, HostPath
from pyshim.model.network import NetworkModel
from pyshim.model.oci import membership
from pyshim.model.plans import ContainerPlan, SandboxPlan
from pyshim.model.vm import BlockDevice, GuestLocation, NicDevice, VhostUserBackend

_MODELS: Mapping[str, int] = {NetworkModel.TCFILTER: 2, NetworkModel.NONE: 3}
"""Kata's NetInterworkingModel. Other models are 0, Kata's default, which is the tc filter, too."""
_VHOST_USER_BLK = "vhost-user-blk-pci"
_ENDPOINTS = {"macvlan": "Macvlan", "ipvlan": "IPVlan"}
_OCI = "io.katacontainers.pkg.oci."


def kata_annotations(plan: ContainerPlan, bundle: HostPath) -> Mapping[str, str]:
    """The container's annotations and the two that Kata's `delete` reads.

    Without these two, Kata's runtime cannot restore the sandbox, and removes its state together with our ledger.
    """
    annotations = plan.guest.spec.get("annotations") or {}
    kind = membership(annotations, plan.container_id).kind
    return {**annotations, f"{_OCI}bundle_path": bundle, f"{_OCI}container_type": kind}


def kata_mounts(plan: ContainerPlan) -> tuple[Mapping[str, object], ...]:
    """The container's volumes as Kata's Mount objects."""
    shared = {posixpath.basename(bind.mount.target): bind.mount for bind in plan.binds}
    disks = {use.storage.mount_point: use.disk.id for use in plan.disks if use.storage is not None}
    found = []
    for mount in plan.guest.spec.get("mounts") or ():
        source, options = mount.get("source") or "", list(mount.get("options") or ())
        host = next((shared[name] for name in source.split("/") if name in shared), None)
        found.append(
            {
                "Source": host.source if host is not None else source,
                "Destination": mount.get("destination") or "",
                "Type": mount.get("type") or "",
                "HostPath": host.target if host is not None else "",
                "BlockDeviceID": disks.get(GuestPath(source), ""),
                "Options": options,
                "ReadOnly": "ro" in options,
            }
        )
    return tuple(found)


def kata_device_maps(plan: ContainerPlan) -> tuple[Mapping[str, object], ...]:
    """The container's device nodes that are disks of the VM."""
    return tuple({"ID": use.disk.id, "ContainerPath": use.container_path} for use in plan.disks if use.container_path)


def kata_device(disk: BlockDevice, location: GuestLocation, users: int) -> Mapping[str, object]:
    """A disk of the VM. Kata's PCIPath has no JSON form, so the path is a driver option."""
    every: dict[str, object] = {
        "ID": disk.id,
        "DevType": "b",
        "DriverOptions": {"block-driver": disk.tuning.bus.value, "pci-path": location.pci_path},
        "RefCount": users,
        "AttachCount": 1,
    }
    if disk.vhost_user is not None:
        return every | _vhost_user(disk, disk.vhost_user)
    return every | {
        "Type": "block",
        "BlockDrive": {
            "File": disk.path,
            "Format": "raw",
            "ID": disk.id,
            "SCSIAddr": location.scsi_address,
            "ReadOnly": disk.read_only,
            "DiscardUnmap": disk.discard,
        },
    }


def _vhost_user(disk: BlockDevice, program: VhostUserBackend) -> dict[str, object]:
    """The keys of a disk that a vhost-user program serves."""
    return {
        "Type": _VHOST_USER_BLK,
        "VhostUserDev": {
            "DevID": disk.id,
            "SocketPath": disk.path,
            "Type": _VHOST_USER_BLK,
            "QueueSize": disk.tuning.queue_size,
            "ReconnectTime": program.reconnect_s,
        },
    }


def kata_endpoint(nic: NicDevice, interfaces: tuple[NetworkInterface, ...], model: str) -> Mapping[str, object]:
    """A NIC of the VM and its link in the namespace, which has the same MAC."""
    interface = next((one for one in interfaces if one.mac == nic.mac), None)
    name, kind = (interface.name, interface.type) if interface is not None else ("", "")
    pair = {
        "ID": nic.id,
        "TAPIface": {"Name": nic.id},
        "VirtIface": {"Name": name, "HardAddr": nic.mac},
        "NetInterworkingModel": kata_model(model),
    }
    return {"Type": kind or "virtual", _ENDPOINTS.get(kind, "Veth"): {"NetPair": pair}}


def kata_model(model: str) -> int:
    return _MODELS.get(model, 0)


def kata_sandbox_config(plan: SandboxPlan) -> Mapping[str, Any]:
    """SandboxConfig, without the keys that `state` fills in."""
    runtime = plan.config.runtime
    return {
        "NetworkConfig": {
            "NetworkID": plan.netns_path or "",
            "NetworkCreated": False,
            "DisableNewNetwork": not plan.netns_path,
            "InterworkingModel": kata_model(runtime.internetworking_model),
        },
        "SharePidNs": plan.guest.shared_pid_namespace,
        "SandboxCgroupOnly": runtime.sandbox_cgroup_only,
        "DisableGuestSeccomp": runtime.disable_guest_seccomp,
        "EnableVCPUsPinning": runtime.enable_vcpus_pinning,
        "SandboxBindMounts": list(runtime.sandbox_bind_mounts),
        "GuestSeLinuxLabel": runtime.guest_selinux_label,
    }
