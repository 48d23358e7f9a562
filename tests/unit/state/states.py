"""States to write and read."""

from pyshim.model.ids import ContainerId, HostPath, SandboxId
from pyshim.model.ledger import LedgerEntry, ResourceKind
from pyshim.model.snapshot import ContainerSnapshot, SandboxSnapshot, SandboxStatus
from pyshim.model.task import ExitStatus, Status, Stdio
from pyshim.state.schema import SandboxState, ShimRecord

SHIM = ShimRecord(pid=4711, start_ticks=99, socket="unix:///run/containerd/s/abc", namespace="k8s.io")
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
        sandbox_id=SandboxId("sb1"),
        shim=SHIM,
        snapshot=snapshot(*containers) if planned else None,
        ledger=LEDGER,
    )
