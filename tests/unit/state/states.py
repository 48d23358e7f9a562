"""States to write and read."""

import json
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from pyshim.model.ids import ContainerId, HostPath, SandboxId
from pyshim.model.ledger import LedgerEntry, ResourceKind
from pyshim.model.sandbox import ContainerSnapshot, SandboxSnapshot, SandboxStatus
from pyshim.model.task import ExitStatus, Status, Stdio
from pyshim.state.schema import SandboxState, ShimRecord, document_of
from pyshim.state.store import StateStore

SHIM = ShimRecord(pid=4711, start_ticks=99, socket="unix:///run/containerd/s/abc", namespace="k8s.io", version="0.2.0")
LEDGER = (
    LedgerEntry(kind=ResourceKind.DIRECTORY, key="/run/vc/vm/sb1"),
    LedgerEntry(kind=ResourceKind.PROCESS, key="/run/vc/vm/sb1/qmp", detail={"pid": 12, "start_ticks": 3}),
)


def container(name: str, end: ExitStatus | None = None) -> ContainerSnapshot:
    return ContainerSnapshot(
        container_id=ContainerId(name),
        bundle=HostPath(f"/bundles/{name}"),
        status=Status.STOPPED if end else Status.RUNNING,
        stdio=Stdio(stdin="", stdout="/fifo/out", stderr="", terminal=True),
        exit=end,
        rootfs=HostPath(f"/bundles/{name}/rootfs"),
        annotations={},
        resources={},
        device_maps=(),
        mounts=(),
    )


def snapshot(*containers: ContainerSnapshot) -> SandboxSnapshot:
    return SandboxSnapshot(
        sandbox_id=SandboxId("sb1"),
        status=SandboxStatus.RUNNING,
        config_source="/etc/kata/configuration.toml",
        hypervisor_type="qemu",
        hypervisor={"UUID": "u-1", "APISocket": "/run/vc/vm/sb1/qmp.sock"},
        hypervisor_config={"KernelPath": "/boot/vmlinuz", "MemorySize": 2048},
        vmm_pid=12,
        agent_address="vsock://5:1024",
        netns_path="/run/netns/x",
        sizing={"vcpus": {"base": "1", "rounded": 2}},
        containers=containers,
        failure="",
    )


def state(*containers: ContainerSnapshot, planned: bool = True) -> SandboxState:
    return SandboxState(
        sandbox_id=SandboxId("sb1"), shim=SHIM, snapshot=snapshot(*containers) if planned else None, ledger=LEDGER
    )


def save(root: str | Path, name: str, **changes: Any) -> None:
    """The sandbox's state is on disk below `root`; `changes` are its snapshot's."""
    saved = replace(snapshot(), sandbox_id=SandboxId(name), **changes)
    StateStore(root=str(root)).save(replace(state(), sandbox_id=SandboxId(name), snapshot=saved))


def everything() -> SandboxState:
    """The state of a pod with everything: an entry of each kind, each kind of device, a bridge, exits."""
    c1 = replace(
        container("c1"),
        annotations={"a": "b"},
        resources={"cpu": {"shares": 2}},
        device_maps=({"ID": "blk-1", "ContainerPath": "/dev/data"},),
        mounts=(
            {"Source": "/srv", "Destination": "/data", "Type": "bind", "Options": ["rbind", "ro"], "ReadOnly": True},
        ),
    )
    c2 = container("c2", ExitStatus(status=137, exited_at_ns=1_700_000_000_000_000_001))
    pair = {
        "ID": "net0",
        "TAPIface": {"Name": "tap0_kata"},
        "VirtIface": {"Name": "eth0", "HardAddr": "02:00:00:00:00:01"},
        "NetInterworkingModel": 2,
    }
    planned = replace(
        snapshot(c1, c2),
        hypervisor={
            "UUID": "u-1",
            "APISocket": "/run/vc/vm/sb1/qmp.sock",
            "Bridges": [{"DeviceAddr": {"2": "blk-1"}, "Type": "pci", "ID": "pci-bridge-0", "Addr": 2}],
            "HotpluggedVCPUs": [{"ID": "cpu-1"}],
            "HotpluggedMemory": 512,
            "BlockIndexMap": {"0": "blk-1"},
            "VirtiofsDaemonPid": 11,
        },
        devices=(
            {
                "ID": "blk-1",
                "Type": "block",
                "DevType": "b",
                "DriverOptions": {"block-driver": "virtio-scsi"},
                "RefCount": 2,
                "BlockDrive": {"File": "/dev/loop1", "Format": "raw", "ID": "blk-1", "SCSIAddr": "0:0"},
            },
            {"ID": "vu-1", "Type": "vhost-user-blk-pci", "VhostUserDev": {"DevID": "vu-1", "SocketPath": "/store/s"}},
            {"ID": "vfio-1", "Type": "vfio", "VFIODevs": [{"ID": "vfio-1", "BDF": "0000:01:00.0"}]},
        ),
        endpoints=(
            {"Type": "virtual", "Veth": {"NetPair": pair}},
            {"Type": "macvlan", "Macvlan": {"NetPair": pair}},
            {"Type": "physical", "Physical": {"BDF": "0000:02:00.0", "Driver": "ixgbe"}},
        ),
        cgroups={
            "SandboxCgroupOnly": True,
            "Groups": [{"Role": "sandbox", "Path": "/pod1/kata_sb1", "Roots": ["/sys/fs/cgroup"]}],
        },
        owner=ContainerId("c1"),
        sandbox_config={"SharePidNs": True, "SandboxBindMounts": ["/etc/ssl"]},
        failure="qemu exited with status 1",
        trace={"began_ns": 1},
    )
    entries = tuple(
        LedgerEntry(kind=kind, key=f"/run/vc/vm/sb1/{kind.value}", detail={"pid": 7, "program": "/usr/bin/qemu"})
        for kind in ResourceKind
    )
    return replace(state(), snapshot=planned, ledger=entries)


def written(state: SandboxState) -> Any:
    """The document of the state, as JSON has it."""
    return json.loads(json.dumps(msgspec.to_builtins(document_of(state))))
