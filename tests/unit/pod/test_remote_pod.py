"""A pod with a remote VM: the real driver, a service in threads, all else fake, in real time."""

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hypervisors.remote.vm import RemoteHypervisor
from pyshim.cleanup.lost_vms import lost_vms
from pyshim.cleanup.undo import undo_entries, undo_entry
from pyshim.model.errors import NotFound, ShimError, Unimplemented
from pyshim.model.ids import ContainerId
from pyshim.model.ledger import LedgerEntry, ResourceKind
from pyshim.model.task import Status
from pyshim.ttrpc import Code
from tests.failpoints.points import Action, Failpoints, Fault
from tests.failpoints.wrapping import seam
from tests.fakes.remote_service import Call, FakeRemoteService

from .conftest import Stack, until

IMAGE = {"io.kubernetes.cri.image-name": "docker.io/library/busybox:1"}
POD = {
    "io.kubernetes.cri.container-type": "sandbox",
    "io.kubernetes.cri.sandbox-id": "c1",
    "io.kubernetes.cri.sandbox-name": "web",
    "io.kubernetes.cri.sandbox-namespace": "shop",
    "io.kubernetes.cri.sandbox-uid": "1-2-3",
}
MEMBER = {**POD, "io.kubernetes.cri.container-type": "container", **IMAGE}
NETWORK = {"namespaces": [{"type": "network", "path": "/proc/self/ns/net"}]}


class RemoteStack(Stack):
    def __init__(self, service: FakeRemoteService, *faults: Fault, timeout_s: float = 60.0) -> None:
        super().__init__()
        self.service = service
        self.vms: list[RemoteHypervisor] = []
        self.points = Failpoints(faults)
        self.document = {
            "hypervisor": {
                "remote": {"remote_hypervisor_socket": service.path, "remote_hypervisor_timeout": int(timeout_s)}
            }
        }

    def _hypervisor(self, ledger: Any, name: str) -> Any:
        assert name == "remote"
        self.vms.append(RemoteHypervisor(ledger=ledger))
        return seam(self.points, "hypervisor", self.vms[-1])

    def held(self) -> list[LedgerEntry]:
        return [entry for records in self.records for entry in records.ledger.entries]


@pytest.fixture(autouse=True)
def graves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyshim.cleanup.lost_vms.LOST_VMS", f"{tmp_path}/lost-vms")


@pytest.fixture
def service(tmp_path: Path) -> Iterator[FakeRemoteService]:
    with FakeRemoteService(str(tmp_path)) as service:
        yield service
        assert service.vms == {}


@pytest.fixture
def faults() -> tuple[Fault, ...]:
    return ()


@pytest.fixture
def stack(service: FakeRemoteService, faults: tuple[Fault, ...], runner: asyncio.Runner) -> Iterator[RemoteStack]:
    """A pod on that service; after the test the host and the service are clean."""

    async def made() -> RemoteStack:
        return RemoteStack(service, *faults)

    stack = runner.run(made())
    undo = stack.host.undo

    async def undone(entry: LedgerEntry) -> None:
        if entry.kind is ResourceKind.REMOTE_VM:
            await asyncio.to_thread(undo_entry, entry, timeout_s=1)
        await undo(entry)

    stack.host.undo = undone  # type: ignore[method-assign]
    yield stack
    runner.run(stack.close())
    # A failed undo is on record, and a clean-up after the shim repeats it.
    kept = tuple(entry for entry in stack.held() if entry.kind is ResourceKind.REMOTE_VM)
    for records in stack.records:
        records.ledger.entries = [entry for entry in records.ledger.entries if entry not in kept]
        records.remove()
    assert stack.left() == {}
    errors: list[str] = []
    assert undo_entries(kept, deadline=0, one_timeout_s=0, errors=errors, check=lambda _entry: None) == (), errors


async def pod_with_container(stack: RemoteStack, args: list[str]) -> ContainerId:
    await stack.run("c1", ["/pause"], annotations=POD, linux=NETWORK)
    return await stack.run("a", args, annotations=MEMBER)


async def test_a_pod_runs_and_ends_on_a_remote_vm(stack: RemoteStack) -> None:
    container = await pod_with_container(stack, ["exit", "7"])

    assert (await stack.pod.wait(container, None)).status == 7
    assert stack.pod.connect(container) == os.getpid()
    snapshot = stack.records[0].snapshots[-1]
    assert (snapshot.hypervisor_type, snapshot.vmm_pid) == ("remote", os.getpid())
    assert snapshot.agent_address == f"unix://{stack.service.agent_path}"
    assert snapshot.hypervisor["APISocket"] == stack.service.path
    assert stack.networks.queues == 0, "nothing was connected"
    assert stack.agent.interfaces == stack.agent.routes == []
    assert not stack.host.daemons
    storages = stack.agent.containers["a"].storages
    assert [(storage.driver, storage.source) for storage in storages][:1] == [
        ("image_guest_pull", IMAGE["io.kubernetes.cri.image-name"])
    ]
    await stack.pod.delete(container, None)
    await stack.pod.kill(ContainerId("c1"), None, 9, False)
    await stack.pod.wait(ContainerId("c1"), None)
    await stack.pod.delete(ContainerId("c1"), None)

    assert stack.service.methods() == ["Version", "CreateVM", "StartVM", "StopVM"]
    request: Any = stack.service.called("CreateVM").request
    assert request.networkNamespacePath == "/proc/self/ns/net"
    assert request.annotations["io.kubernetes.cri.sandbox-uid"] == "1-2-3"


@pytest.mark.parametrize("gives_up", [False, True], ids=["and runs", "and is given up"])
async def test_the_vm_is_made_while_the_kernel_moves_the_shim(stack: RemoteStack, gives_up: bool) -> None:
    stack.host.cgroup_tree.may_join.clear()
    creation = asyncio.ensure_future(stack.create("c1", ["/pause"], annotations=POD, linux=NETWORK))
    await until(lambda: stack.service.methods()[-1:] == ["StartVM"])

    assert not creation.done()
    if gives_up:
        with pytest.raises(NotFound):
            await stack.pod.delete(ContainerId("c1"), None)
        with pytest.raises(ShimError):
            await creation
        assert stack.service.methods()[-1] == "StopVM"
    else:
        stack.host.cgroup_tree.may_join.set()
        await creation
        (group,) = (path for path, members in stack.host.cgroup_tree.there.items() if members)
        assert stack.host.cgroup_tree.there[group] == {os.getpid()}


async def test_the_loss_of_the_agent_ends_every_task_with_255_and_the_vm(stack: RemoteStack) -> None:
    container = await pod_with_container(stack, ["sleep"])

    stack.clients[-1].close()

    for name in (container, ContainerId("c1")):
        assert (await stack.pod.wait(name, None)).status == 255
    await until(lambda: stack.service.vms == {})
    assert stack.pod.state(container, None).status is Status.STOPPED

    assert stack.service.methods()[-1] == "StopVM"


async def test_a_service_that_crashes_under_a_pod_leaves_its_vm_on_record(stack: RemoteStack) -> None:
    """The service has forgotten its VMs: StopVM answers that there is none, and the tombstone ends the entry."""

    container = await pod_with_container(stack, ["sleep"])
    stack.service.crash()
    stack.clients[-1].close()
    assert (await stack.pod.wait(container, None)).status == 255
    assert [entry.key for entry in stack.held() if entry.kind is ResourceKind.REMOTE_VM] == ["c1"]
    stack.service.open()
    await until(lambda: stack.held() == [])

    assert [lost.id for lost in lost_vms()] == ["c1"]


DEVICES = [{"path": "/dev/loop7", "type": "b", "major": 7, "minor": 7}]


async def test_a_block_device_of_this_host_is_refused_by_name(stack: RemoteStack) -> None:
    await stack.run("c1", ["/pause"], annotations=POD, linux=NETWORK)
    with pytest.raises(Unimplemented, match="this vm takes no devices while it runs"):
        await stack.run("a", ["sleep"], annotations=MEMBER, linux={"devices": DEVICES})


FAULTS = [
    Fault(point=f"hypervisor.{call}:{when}", nth=1, action=action, seconds=0)
    for call in ("create", "start", "stop")
    for when in ("before", "after")
    for action in ((Action.ERROR,) if call == "stop" else (Action.ERROR, Action.CANCEL))
]


@pytest.mark.parametrize(
    "faults", [(fault,) for fault in FAULTS], ids=lambda faults: f"{faults[0].point}={faults[0].action}"
)
async def test_after_any_failed_step_nothing_is_left_here_or_at_the_service(
    stack: RemoteStack, faults: tuple[Fault, ...]
) -> None:
    try:
        container = await pod_with_container(stack, ["sleep"])
    except (ShimError, asyncio.CancelledError):
        pass
    else:
        await stack.end(container)

    assert ("CreateVM" in stack.service.methods()) is (faults[0].point != "hypervisor.create:before")


SERVICE_FAILS: dict[str, Callable[[Call], None]] = {
    "CreateVM": lambda call: call.fail(Code.UNKNOWN, "no quota"),
    "StartVM": lambda call: call.fail(Code.UNKNOWN, "creating an instance: no capacity in zone"),
}


@pytest.mark.parametrize("method", SERVICE_FAILS)
async def test_an_error_of_the_service_reaches_the_user(method: str, stack: RemoteStack) -> None:
    stack.service.behave[method] = SERVICE_FAILS[method]
    with pytest.raises(ShimError, match=r"(create|start) remote vm 'c1': '.*hypervisor.sock' says: .*no"):
        await stack.create("c1", ["/pause"], annotations=POD, linux=NETWORK)

    assert stack.service.methods()[-1] == "StopVM"
