"""The remote driver: the making and the life of a VM, with a service that works and one that does not."""

import asyncio
import os
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from hypervisors.remote.vm import RemoteHypervisor
from protos import hypervisor_pb2 as pb
from pyshim.model.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    ShimError,
    Unavailable,
    Unimplemented,
)
from pyshim.model.ledger import LedgerEntry
from pyshim.model.observation import Trace
from pyshim.model.remote_vms import MAX_REPLY_BYTES
from pyshim.model.vm import VmExitKind
from pyshim.ttrpc import Code
from pyshim.ttrpc.framing import HEADER, RESPONSE
from tests.fakes.disks import disk
from tests.fakes.ledger import FakeLedger
from tests.fakes.remote_service import Call, FakeRemoteService, after, done_unsaid, hang_up, never, when
from tests.fakes.unix_sockets import crowded
from tests.fakes.vm_config import vm_config
from tests.unit.hypervisors.remote.conftest import LONG_S, REMOTE, SHORT_S, VM, config, held_state, live

pytestmark = pytest.mark.usefixtures("no_task_left")


def listening(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    return listener


async def test_a_vm_is_created_started_and_stopped(service: FakeRemoteService, ledger: FakeLedger) -> None:
    vm = RemoteHypervisor(ledger=ledger)

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
async def test_calls_of_the_service_have_spans_with_the_instance_type(
    service: FakeRemoteService, ledger: FakeLedger, machine_type: str, asked: str
) -> None:
    trace = Trace(time.monotonic_ns)

    vm = RemoteHypervisor(ledger=ledger)

    async def life() -> None:
        await vm.create(replace(config(service), machine_type=machine_type))
        await vm.start()
        await vm.stop()

    with trace.of("pod"):
        await life()

    assert [span.name for span in trace.spans] == ["pod", asked, "ask StartVM"]


async def test_calls_have_annotations_namespace_and_deadlines_and_stop_has_none(
    service: FakeRemoteService, ledger: FakeLedger
) -> None:
    await live(service, ledger)

    create = service.called("CreateVM")
    assert create.request == pb.CreateVMRequest(
        id=VM, annotations={"a": "1", "b": ""}, networkNamespacePath="/proc/self/ns/net"
    )
    assert (create.timeout_s, service.called("StartVM").timeout_s) == (LONG_S, LONG_S)
    assert service.called("StopVM").timeout_s == 0


async def test_the_ledger_has_the_vm_before_create_vm_is_sent(service: FakeRemoteService, ledger: FakeLedger) -> None:
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


async def test_an_agent_path_that_is_no_socket_is_refused(service: FakeRemoteService, ledger: FakeLedger) -> None:
    Path(service.agent_path).write_text("")

    vm = RemoteHypervisor(ledger=ledger)
    await vm.create(config(service))
    with pytest.raises(FailedPrecondition, match="is not a socket"):
        await vm.start()
    await vm.stop()

    assert (service.vms, ledger.held) == ({}, {})


async def test_start_fails_when_the_service_has_died_after_create(
    service: FakeRemoteService, ledger: FakeLedger
) -> None:
    vm = RemoteHypervisor(ledger=ledger)
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


REFUSED: dict[str, tuple[Callable[[RemoteHypervisor], Awaitable[object]], type[ShimError]]] = {
    "pause": (lambda vm: vm.pause(), Unimplemented),
    "resume": (lambda vm: vm.resume(), Unimplemented),
    "plug": (lambda vm: vm.plug(disk("disk-1", "/none")), Unimplemented),
    "unplug": (lambda vm: vm.unplug("disk-1"), NotFound),
    "resize disk": (lambda vm: vm.resize_disk("disk-1", 1), NotFound),
    "more memory": (lambda vm: vm.resize_memory(512), Unimplemented),
    "no vcpus": (lambda vm: vm.resize_vcpus(0), InvalidArgument),
}


@pytest.mark.parametrize(("call", "error"), REFUSED.values(), ids=REFUSED)
async def test_changes_of_a_remote_vm_are_refused_and_not_offered(
    service: FakeRemoteService,
    ledger: FakeLedger,
    call: Callable[[RemoteHypervisor], Awaitable[object]],
    error: type[ShimError],
) -> None:
    vm = RemoteHypervisor(ledger=ledger)
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
    vm = RemoteHypervisor(ledger=ledger)
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
    vm = RemoteHypervisor(ledger=ledger)
    await vm.stop()
    with pytest.raises(FailedPrecondition):
        await vm.create(config(service))

    assert service.calls == []


async def test_an_agent_socket_that_listens_is_accepted(service: FakeRemoteService, ledger: FakeLedger) -> None:
    with listening(service.agent_path):
        await live(service, ledger)

    os.unlink(service.agent_path)


async def test_the_ledger_entry_has_the_details_for_a_clean_up(service: FakeRemoteService, ledger: FakeLedger) -> None:
    vm = RemoteHypervisor(ledger=ledger, clock_s=lambda: 1000.25, late_s=10)
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


async def test_without_a_ledger_entry_no_call_is_sent(service: FakeRemoteService) -> None:
    vm = RemoteHypervisor(ledger=FakeLedger(full_after=0))
    with pytest.raises(FailedPrecondition, match="ENOSPC"):
        await vm.create(config(service))

    assert service.methods() == ["Version"]


async def test_an_unreachable_service_leaves_no_ledger_entry(tmp_path: Path, ledger: FakeLedger) -> None:
    absent = FakeRemoteService(str(tmp_path))

    vm = RemoteHypervisor(ledger=ledger)
    with pytest.raises(Unavailable, match=rf"connect remote hypervisor '{absent.path}': No such file.*\(hint"):
        await vm.create(config(absent))

    assert ledger.history == []


async def test_a_service_with_a_full_listen_queue_is_waited_for(service: FakeRemoteService, ledger: FakeLedger) -> None:
    service.close()

    with crowded(service.path):
        vm = RemoteHypervisor(ledger=ledger)
        creating = asyncio.create_task(vm.create(config(service)))
        await asyncio.sleep(SHORT_S)
        service.open()
        await creating
        await vm.stop()

    assert service.methods() == ["Version", "CreateVM", "StopVM"]


async def test_a_service_without_version_is_accepted(service: FakeRemoteService, ledger: FakeLedger) -> None:
    service.behave["Version"] = lambda call: call.fail(Code.UNIMPLEMENTED, "unknown method")

    vm = RemoteHypervisor(ledger=ledger)
    await vm.create(config(service))
    await vm.stop()


BAD_PATHS = {
    "none": ("", "no path"),
    "relative": ("run/agent.ttrpc", "no absolute path"),
    "nul": ("/run/a\0b", "no absolute path"),
    "long": ("/run/" + "x" * 200, "too long for a socket"),
}


@pytest.mark.parametrize(("path", "words"), BAD_PATHS.values(), ids=BAD_PATHS)
async def test_an_invalid_agent_path_ends_the_vm(
    service: FakeRemoteService, ledger: FakeLedger, path: str, words: str
) -> None:
    service.agent_path = path

    vm = RemoteHypervisor(ledger=ledger)
    with pytest.raises(FailedPrecondition, match=f"create remote vm '{VM}': the service gave .*{words}"):
        await vm.create(config(service))

    assert (service.vms, ledger.held) == ({}, {})


def oversized(call: Call) -> None:
    call.send(HEADER.pack(1 << 30, 1, RESPONSE, 0))
    call.send(b"x" * (1 << 16))
    call.hang_up()


def long(call: Call) -> None:
    """A message that ttrpc would still take, of what no caller asked for."""
    call.send(call._core.response(call._stream_id, b"\x12\x00" * MAX_REPLY_BYTES))


def garbled(call: Call) -> None:
    call._sock.sendall(call._core.response(call._stream_id, b"\xff\xff\xff"))


BAD_ANSWERS: dict[str, tuple[Callable[[Call], None], type[ShimError], str]] = {
    "error": (lambda call: call.fail(Code.UNKNOWN, "no quota\nleft"), FailedPrecondition, "says: no quota left"),
    "hangs up": (hang_up, Unavailable, "closed the connection before it answered"),
    "carried out, then hangs up": (done_unsaid, Unavailable, "closed the connection before it answered"),
    "oversized": (oversized, ShimError, "CreateVM|exceeds|closed"),
    "long": (long, Internal, "reply of .* exceeds the limit"),
    "garbled": (garbled, Internal, "is not a CreateVMResponse"),
    "never": (never, DeadlineExceeded, "has not answered within 0.3 s"),
}


@pytest.mark.parametrize(("behaviour", "error", "words"), BAD_ANSWERS.values(), ids=BAD_ANSWERS)
async def test_a_failed_creation_leaves_no_vm_and_no_ledger_entry(
    service: FakeRemoteService,
    ledger: FakeLedger,
    behaviour: Callable[[Call], None],
    error: type[ShimError],
    words: str,
) -> None:
    service.behave["CreateVM"] = behaviour

    vm = RemoteHypervisor(ledger=ledger, late_s=SHORT_S, settle_s=SHORT_S)
    with pytest.raises(error, match=words):
        await vm.create(config(service, timeout_s=SHORT_S if behaviour is never else LONG_S))

    assert service.methods()[-1] == "StopVM"
    assert (service.vms, ledger.held) == ({}, {})


async def test_a_repeated_answer_is_dropped(service: FakeRemoteService, ledger: FakeLedger) -> None:
    def twice(call: Call) -> None:
        service.vms[call.id] = "created"
        call.twice(pb.CreateVMResponse(agentSocketPath=service.agent_path))

    service.behave["CreateVM"] = twice

    await live(service, ledger)

    assert (service.vms, ledger.held) == ({}, {})


@pytest.mark.parametrize("method", ["CreateVM", "StartVM"])
async def test_stop_waits_for_a_call_whose_caller_gave_up(
    service: FakeRemoteService, ledger: FakeLedger, method: str
) -> None:
    """A service whose call is cut off may forget what it has begun: the answer comes late, then the end."""
    allowed = threading.Event()
    service.behave[method] = when(allowed)

    vm = RemoteHypervisor(ledger=ledger)

    async def life() -> None:
        await vm.create(config(service))
        await vm.start()

    living = asyncio.create_task(life())
    await asyncio.to_thread(service.called, method)
    living.cancel()
    stopping = asyncio.create_task(vm.stop())
    await asyncio.sleep(SHORT_S)
    assert "StopVM" not in service.methods()
    allowed.set()
    await stopping
    with pytest.raises(asyncio.CancelledError):
        await living

    assert service.methods()[-2:] == [method, "StopVM"]
    assert (service.vms, ledger.held) == ({}, {})


async def test_a_vm_that_is_made_after_the_deadline_is_stopped(service: FakeRemoteService, ledger: FakeLedger) -> None:
    """The service has the VM only once it has made it: StopVM before that would find nothing."""
    service.behave["CreateVM"] = after(4 * SHORT_S)

    vm = RemoteHypervisor(ledger=ledger)
    with pytest.raises(DeadlineExceeded, match=f"create remote vm '{VM}': .* has not answered within 0.3 s"):
        await vm.create(config(service, timeout_s=SHORT_S))

    assert service.methods()[-2:] == ["CreateVM", "StopVM"]
    assert (service.vms, ledger.held) == ({}, {})


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (hang_up, "closed the connection before it answered"),
        (lambda call: call.fail(Code.DEADLINE_EXCEEDED, "too late"), "says: too late"),
    ],
    ids=["connection lost", "server's own word at the deadline"],
)
async def test_a_vm_that_is_made_after_its_call_has_ended_is_stopped(
    service: FakeRemoteService, ledger: FakeLedger, end: Callable[[Call], None], words: str
) -> None:
    def ended_and_made(call: Call) -> None:
        end(call)
        service.called("StopVM")
        service.vms[call.id] = "created"

    service.behave["CreateVM"] = ended_and_made

    with pytest.raises(ShimError, match=words):
        await RemoteHypervisor(ledger=ledger, settle_s=LONG_S).create(config(service))

    assert service.methods().count("StopVM") > 1
    assert (service.vms, ledger.held) == ({}, {})


async def test_the_ledger_has_a_creation_whose_outcome_is_unknown(
    service: FakeRemoteService, ledger: FakeLedger
) -> None:
    """Who cleans up after a shim that dies now must not believe "no such VM" at once either."""
    closed = threading.Event()

    def gone(call: Call) -> None:
        call.hang_up()
        service.close()
        closed.set()

    service.behave["CreateVM"] = gone

    vm = RemoteHypervisor(ledger=ledger, clock_s=lambda: 1000.25, retry_s=0, settle_s=SHORT_S)
    with pytest.raises(Unavailable, match="closed the connection"):
        await vm.create(config(service))
    detail = ledger.held[REMOTE, VM].detail
    assert (detail["state"], detail["asked_until_s"]) == ("asked", 1001)
    await asyncio.to_thread(closed.wait, LONG_S)  # else it would take the new socket away
    service.open()
    await vm.stop()

    assert ledger.held == {}


async def test_after_a_stop_no_vm_is_created(service: FakeRemoteService, ledger: FakeLedger) -> None:
    allowed = threading.Event()
    service.behave["Version"] = when(allowed)

    vm = RemoteHypervisor(ledger=ledger)
    creating = asyncio.create_task(vm.create(config(service)))
    await asyncio.to_thread(service.called, "Version")
    await vm.stop()
    allowed.set()
    with pytest.raises(Unavailable, match="has ended"):
        await creating

    assert service.methods() == ["Version"]
    assert (service.vms, ledger.history) == ({}, [])


BAD_CONFIGS: dict[str, tuple[dict[str, Any], type[ShimError], str]] = {
    "no such namespace": ({"netns_path": "/none/such"}, FailedPrecondition, "'/none/such' does not exist"),
}


@pytest.mark.parametrize(("changes", "error", "words"), BAD_CONFIGS.values(), ids=BAD_CONFIGS)
async def test_a_vm_that_no_service_can_make_is_refused_without_a_call(
    service: FakeRemoteService, ledger: FakeLedger, changes: dict[str, Any], error: type[ShimError], words: str
) -> None:
    with pytest.raises(error, match=words):
        await RemoteHypervisor(ledger=ledger).create(replace(config(service), **changes))

    assert service.calls == []


async def test_a_vm_of_this_host_is_refused(ledger: FakeLedger) -> None:
    with pytest.raises(InvalidArgument, match="no service was named"):
        await RemoteHypervisor(ledger=ledger).create(vm_config())
