"""The creation of a remote VM: services that refuse, garble or take too long, and callers that give up."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from hypervisors.remote.vm import RemoteVm
from protos import hypervisor_pb2 as pb
from pyshim.model.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    ShimError,
    Unavailable,
)
from pyshim.model.remote_vms import MAX_REPLY_BYTES
from pyshim.ttrpc import Code
from pyshim.ttrpc.framing import HEADER, RESPONSE
from tests.fakes.ledger import FakeLedger
from tests.fakes.remote_service import Call, FakeRemoteService, after, done_unsaid, hang_up, never, when
from tests.fakes.unix_sockets import crowded
from tests.unit.hypervisors.remote.conftest import LONG_S, REMOTE, SHORT_S, VM, config, live

pytestmark = pytest.mark.usefixtures("no_task_left")


async def test_an_intent_that_cannot_be_written_asks_for_nothing(service: FakeRemoteService) -> None:
    vm = RemoteVm(ledger=FakeLedger(full_after=0))
    with pytest.raises(FailedPrecondition, match="ENOSPC"):
        await vm.create(config(service))

    assert service.methods() == ["Version"]


async def test_a_service_that_is_not_there_leaves_nothing_on_record(tmp_path: Path, ledger: FakeLedger) -> None:
    absent = FakeRemoteService(str(tmp_path))

    vm = RemoteVm(ledger=ledger)
    with pytest.raises(Unavailable, match=rf"connect remote hypervisor '{absent.path}': No such file.*\(hint"):
        await vm.create(config(absent))

    assert ledger.history == []


async def test_a_service_that_has_no_room_for_callers_is_waited_for(
    service: FakeRemoteService, ledger: FakeLedger
) -> None:
    service.close()

    with crowded(service.path):
        vm = RemoteVm(ledger=ledger)
        creating = asyncio.create_task(vm.create(config(service)))
        await asyncio.sleep(SHORT_S)
        service.open()
        await creating
        await vm.stop()

    assert service.methods() == ["Version", "CreateVM", "StopVM"]


async def test_a_service_without_version_is_taken_as_it_is(service: FakeRemoteService, ledger: FakeLedger) -> None:
    service.behave["Version"] = lambda call: call.fail(Code.UNIMPLEMENTED, "unknown method")

    vm = RemoteVm(ledger=ledger)
    await vm.create(config(service))
    await vm.stop()


BAD_PATHS = {
    "none": ("", "no path"),
    "relative": ("run/agent.ttrpc", "no absolute path"),
    "nul": ("/run/a\0b", "no absolute path"),
    "long": ("/run/" + "x" * 200, "too long for a socket"),
}


@pytest.mark.parametrize(("path", "words"), BAD_PATHS.values(), ids=BAD_PATHS)
async def test_a_path_that_can_be_no_socket_ends_the_vm(
    service: FakeRemoteService, ledger: FakeLedger, path: str, words: str
) -> None:
    service.agent_path = path

    vm = RemoteVm(ledger=ledger)
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
async def test_a_creation_that_fails_leaves_no_vm_and_no_record(
    service: FakeRemoteService,
    ledger: FakeLedger,
    behaviour: Callable[[Call], None],
    error: type[ShimError],
    words: str,
) -> None:
    service.behave["CreateVM"] = behaviour

    vm = RemoteVm(ledger=ledger, late_s=SHORT_S, doubt_s=SHORT_S)
    with pytest.raises(error, match=words):
        await vm.create(config(service, timeout_s=SHORT_S if behaviour is never else LONG_S))

    assert service.methods()[-1] == "StopVM"
    assert (service.vms, ledger.held) == ({}, {})


async def test_an_answer_that_comes_twice_is_one(service: FakeRemoteService, ledger: FakeLedger) -> None:
    def twice(call: Call) -> None:
        service.vms[call.id] = "created"
        call.twice(pb.CreateVMResponse(agentSocketPath=service.agent_path))

    service.behave["CreateVM"] = twice

    await live(service, ledger)

    assert (service.vms, ledger.held) == ({}, {})


@pytest.mark.parametrize("method", ["CreateVM", "StartVM"])
async def test_a_call_that_is_given_up_is_waited_for_before_the_vm_is_stopped(
    service: FakeRemoteService, ledger: FakeLedger, method: str
) -> None:
    """A service whose call is cut off may forget what it has begun: the answer comes late, then the end."""
    allowed = threading.Event()
    service.behave[method] = when(allowed)

    vm = RemoteVm(ledger=ledger)

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

    vm = RemoteVm(ledger=ledger)
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
        await RemoteVm(ledger=ledger, doubt_s=LONG_S).create(config(service))

    assert service.methods().count("StopVM") > 1
    assert (service.vms, ledger.held) == ({}, {})


async def test_a_creation_whose_outcome_is_in_doubt_is_so_on_record_too(
    service: FakeRemoteService, ledger: FakeLedger
) -> None:
    """Who cleans up after a shim that dies now must not believe "no such VM" at once either."""
    closed = threading.Event()

    def gone(call: Call) -> None:
        call.hang_up()
        service.close()
        closed.set()

    service.behave["CreateVM"] = gone

    vm = RemoteVm(ledger=ledger, clock_s=lambda: 1000.25, reach_s=0, doubt_s=SHORT_S)
    with pytest.raises(Unavailable, match="closed the connection"):
        await vm.create(config(service))
    detail = ledger.held[REMOTE, VM].detail
    assert (detail["state"], detail["asked_until_s"]) == ("asked", 1001)
    await asyncio.to_thread(closed.wait, LONG_S)  # else it would take the new socket away
    service.open()
    await vm.stop()

    assert ledger.held == {}


async def test_a_stop_before_the_vm_is_asked_for_keeps_it_from_being_made(
    service: FakeRemoteService, ledger: FakeLedger
) -> None:
    allowed = threading.Event()
    service.behave["Version"] = when(allowed)

    vm = RemoteVm(ledger=ledger)
    creating = asyncio.create_task(vm.create(config(service)))
    await asyncio.to_thread(service.called, "Version")
    await vm.stop()
    allowed.set()
    with pytest.raises(Unavailable, match="has ended"):
        await creating

    assert service.methods() == ["Version"]
    assert (service.vms, ledger.history) == ({}, [])


BAD_CONFIGS: dict[str, tuple[dict[str, Any], type[ShimError], str]] = {
    "no service": ({"remote": None}, InvalidArgument, "no service was named"),
    "no such namespace": ({"netns_path": "/none/such"}, FailedPrecondition, "'/none/such' does not exist"),
}


@pytest.mark.parametrize(("changes", "error", "words"), BAD_CONFIGS.values(), ids=BAD_CONFIGS)
async def test_what_no_service_could_make_is_refused_without_a_call(
    service: FakeRemoteService, ledger: FakeLedger, changes: dict[str, Any], error: type[ShimError], words: str
) -> None:
    with pytest.raises(error, match=words):
        await RemoteVm(ledger=ledger).create(replace(config(service), **changes))

    assert service.calls == []
