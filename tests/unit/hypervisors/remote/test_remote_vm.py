"""The remote driver against a service that does what it should, and one that does not."""

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from hypervisors.remote.vm import RemoteVm
from protos import hypervisor_pb2 as pb
from pyshim.model.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ShimError,
    Unavailable,
    Unimplemented,
)
from pyshim.model.ledger import LedgerEntry
from pyshim.model.trace import Trace
from pyshim.model.vm import VmExitKind
from tests.fakes.disks import disk
from tests.fakes.ledger import FakeLedger
from tests.fakes.remote_service import Call, FakeRemoteService, after
from tests.unit.hypervisors.remote.conftest import LONG_S, REMOTE, SHORT_S, VM, config, held_state, live

pytestmark = pytest.mark.usefixtures("no_task_left")


def listening(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    return listener


async def test_a_vm_is_created_started_and_stopped(service: FakeRemoteService, ledger: FakeLedger) -> None:
    vm = RemoteVm(ledger=ledger)

    await vm.create(config(service))
    assert str(vm.agent_address) == f"unix://{service.agent_path}"
    assert ledger.held[REMOTE, VM].detail["agent"] == service.agent_path
    await vm.start()
    assert service.vms == {VM: "running"}
    waiting = asyncio.create_task(vm.wait())
    await vm.stop()

    assert (await waiting).kind is VmExitKind.REQUESTED
    assert (service.vms, ledger.held) == ({}, {})
    assert service.methods() == ["Version", "CreateVM", "StartVM", "StopVM"]


@pytest.mark.parametrize(("machine_type", "asked"), [("", "ask CreateVM"), ("g5.xlarge", "ask CreateVM of g5.xlarge")])
async def test_the_services_work_has_spans_with_the_type_that_was_asked(
    service: FakeRemoteService, ledger: FakeLedger, machine_type: str, asked: str
) -> None:
    trace = Trace(time.monotonic_ns)

    vm = RemoteVm(ledger=ledger)

    async def life() -> None:
        await vm.create(replace(config(service), machine_type=machine_type))
        await vm.start()
        await vm.stop()

    await trace.of("pod", life())

    assert [span.name for span in trace.spans] == ["pod", asked, "ask StartVM"]


async def test_the_service_gets_annotations_namespace_and_deadlines_but_none_for_the_end(
    service: FakeRemoteService, ledger: FakeLedger
) -> None:
    await live(service, ledger)

    create = service.called("CreateVM")
    assert create.request == pb.CreateVMRequest(
        id=VM, annotations={"a": "1", "b": ""}, networkNamespacePath="/proc/self/ns/net"
    )
    assert (create.timeout_s, service.called("StartVM").timeout_s) == (LONG_S, LONG_S)
    assert service.called("StopVM").timeout_s == 0


async def test_the_intent_is_in_the_ledger_before_the_vm_is_asked_for(
    service: FakeRemoteService, ledger: FakeLedger
) -> None:
    seen: list[object] = []

    def look(call: Call) -> None:
        seen.append(held_state(ledger))
        call.do()

    service.behave = {"Version": look, "CreateVM": look, "StartVM": look, "StopVM": look}

    await live(service, ledger)

    assert seen == [None, "asked", "started", "started"]
    assert [(verb, entry.detail["state"]) for verb, entry in ledger.history][-2:] == [
        ("acquire", "stopped"),
        ("release", "stopped"),
    ]


async def test_what_is_no_socket_is_not_dialled(service: FakeRemoteService, ledger: FakeLedger) -> None:
    Path(service.agent_path).write_text("")

    vm = RemoteVm(ledger=ledger)
    await vm.create(config(service))
    with pytest.raises(FailedPrecondition, match="is not a socket"):
        await vm.start()
    await vm.stop()

    assert (service.vms, ledger.held) == ({}, {})


async def test_a_service_that_dies_between_create_and_start_ends_the_start(
    service: FakeRemoteService, ledger: FakeLedger
) -> None:
    vm = RemoteVm(ledger=ledger)
    await vm.create(config(service))
    service.crash()
    with pytest.raises(Unavailable, match=f"start remote vm '{VM}'"):
        await vm.start()
    service.open()  # restarted: it has no VMs
    await vm.stop()

    assert ledger.held == {}


async def test_a_slow_service_is_no_failure(service: FakeRemoteService, ledger: FakeLedger) -> None:
    service.behave = dict.fromkeys(("CreateVM", "StartVM", "StopVM"), after(SHORT_S))

    await live(service, ledger)

    assert (service.vms, ledger.held) == ({}, {})


REFUSED: dict[str, tuple[Callable[[RemoteVm], Awaitable[object]], type[ShimError]]] = {
    "pause": (lambda vm: vm.pause(), Unimplemented),
    "resume": (lambda vm: vm.resume(), Unimplemented),
    "plug": (lambda vm: vm.plug(disk("disk-1", "/none")), Unimplemented),
    "unplug": (lambda vm: vm.unplug("disk-1"), NotFound),
    "resize disk": (lambda vm: vm.resize_disk("disk-1", 1), NotFound),
    "more memory": (lambda vm: vm.resize_memory(512), Unimplemented),
    "no vcpus": (lambda vm: vm.resize_vcpus(0), InvalidArgument),
}


@pytest.mark.parametrize(("call", "error"), REFUSED.values(), ids=REFUSED)
async def test_what_such_a_vm_cannot_do_is_refused_and_not_offered(
    service: FakeRemoteService,
    ledger: FakeLedger,
    call: Callable[[RemoteVm], Awaitable[object]],
    error: type[ShimError],
) -> None:
    vm = RemoteVm(ledger=ledger)
    await vm.create(config(service))
    await vm.start()
    offered = vm.capabilities()
    assert not any(getattr(offered, name) for name in offered.__slots__), "nor does it report its end"
    with pytest.raises(error, match=r"remote|at least 1"):
        await call(vm)
    assert await vm.resize_vcpus(8) == 1
    assert await vm.resize_memory(100) == 256
    assert await vm.vcpu_thread_ids() == ()
    await vm.stop()
    with pytest.raises((Unavailable, InvalidArgument)):
        await call(vm)


async def test_calls_before_create_are_refused_and_one_object_has_one_vm(
    service: FakeRemoteService, ledger: FakeLedger
) -> None:
    vm = RemoteVm(ledger=ledger)
    for call in (vm.start, vm.pause, vm.wait, vm.vcpu_thread_ids):
        with pytest.raises(FailedPrecondition):
            await call()
    for ask in (vm.saved, vm.capabilities, lambda: vm.agent_address):
        with pytest.raises(FailedPrecondition):
            ask()
    await vm.create(config(service))
    assert (vm.pid, vm.console_tail()) == (0, "")
    assert vm.saved() == {"Type": "remote", "UUID": config(service).uuid, "APISocket": service.path, "Pid": 0}
    with pytest.raises(FailedPrecondition):
        await vm.create(config(service))
    await vm.stop()
    await vm.stop()
    with pytest.raises(Unavailable):
        await vm.start()

    assert ledger.held == {}


async def test_stop_is_fine_before_create_and_forbids_it_after(service: FakeRemoteService, ledger: FakeLedger) -> None:
    vm = RemoteVm(ledger=ledger)
    await vm.stop()
    with pytest.raises(FailedPrecondition):
        await vm.create(config(service))

    assert service.calls == []


async def test_an_agent_socket_that_listens_is_taken(service: FakeRemoteService, ledger: FakeLedger) -> None:
    with listening(service.agent_path):
        await live(service, ledger)

    os.unlink(service.agent_path)


async def test_the_entry_says_what_a_clean_up_needs(service: FakeRemoteService, ledger: FakeLedger) -> None:
    vm = RemoteVm(ledger=ledger, clock_s=lambda: 1000.25, late_s=10)
    await vm.create(config(service))
    assert ledger.held[REMOTE, VM] == LedgerEntry(
        kind=REMOTE,
        key=VM,
        detail={
            "socket": service.path,
            "state": "known",
            "agent": service.agent_path,
            "asked_until_s": 1071,
            "stop_timeout_s": 60,
        },
    )
    await vm.stop()
