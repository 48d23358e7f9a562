"""The end of a remote VM by its own driver: a service that is slow, away or silent when it is asked."""

import asyncio
import threading
from contextlib import suppress

import pytest

from hypervisors.remote.vm import RemoteHypervisor
from pyshim.cleanup.lost_vms import lost_vms
from pyshim.model.errors import DeadlineExceeded, FailedPrecondition, Unavailable
from pyshim.ttrpc import Code
from tests.fakes.ledger import FakeLedger
from tests.fakes.remote_service import FakeRemoteService, done_unsaid, never, when
from tests.unit.hypervisors.remote.conftest import SHORT_S, VM, config, held_state


async def test_a_stop_whose_caller_gives_up_goes_on_and_is_joined(
    service: FakeRemoteService, ledger: FakeLedger
) -> None:
    allowed = threading.Event()
    service.behave["StopVM"] = when(allowed)

    vm = RemoteHypervisor(ledger=ledger)
    await vm.create(config(service))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(SHORT_S):
            await vm.stop()
    assert held_state(ledger) == "known"
    allowed.set()
    await vm.stop()

    assert service.methods().count("StopVM") == 1
    assert (service.vms, ledger.held) == ({}, {})


async def test_a_stop_without_an_answer_stays_in_the_ledger_and_may_be_repeated(
    service: FakeRemoteService, ledger: FakeLedger
) -> None:
    service.behave["StopVM"] = never

    vm = RemoteHypervisor(ledger=ledger)
    await vm.create(config(service, stop_timeout_s=SHORT_S))
    with pytest.raises(DeadlineExceeded, match=f"stop remote vm '{VM}'"):
        await vm.stop()
    assert held_state(ledger) == "known"
    del service.behave["StopVM"]
    while held_state(ledger) is not None:  # its limit is the same short one
        with suppress(DeadlineExceeded):
            await vm.stop()

    assert (service.vms, ledger.held) == ({}, {})


async def test_a_second_stop_of_a_vm_that_is_gone_is_success(service: FakeRemoteService, ledger: FakeLedger) -> None:
    service.behave["StopVM"] = done_unsaid

    vm = RemoteHypervisor(ledger=ledger)
    await vm.create(config(service))
    stopping = asyncio.create_task(vm.stop())
    await asyncio.to_thread(service.called, "StopVM")
    del service.behave["StopVM"]
    await stopping
    await vm.stop()

    assert service.methods().count("StopVM") >= 2
    assert ledger.held == {}


async def test_other_not_found_answers_to_stop_do_not_count_as_stopped(
    service: FakeRemoteService, ledger: FakeLedger
) -> None:
    service.behave["StopVM"] = lambda call: call.fail(Code.UNKNOWN, f"stop {VM}: lookup api.cloud: no such host")

    vm = RemoteHypervisor(ledger=ledger)
    await vm.create(config(service))
    with pytest.raises(FailedPrecondition, match="no such host"):
        await vm.stop()
    del service.behave["StopVM"]
    assert held_state(ledger) == "known"
    await vm.stop()


async def test_stop_is_repeated_while_the_service_restarts(service: FakeRemoteService, ledger: FakeLedger) -> None:
    vm = RemoteHypervisor(ledger=ledger)
    await vm.create(config(service))
    service.close()
    stopping = asyncio.create_task(vm.stop())
    await asyncio.sleep(SHORT_S)
    service.open()
    await stopping

    assert (service.vms, ledger.held) == ({}, {})


async def test_the_vm_stays_in_the_ledger_without_its_service(service: FakeRemoteService, ledger: FakeLedger) -> None:
    vm = RemoteHypervisor(ledger=ledger, retry_s=0)
    await vm.create(config(service))
    service.close()
    with pytest.raises(Unavailable, match="No such file"):
        await vm.stop()

    assert held_state(ledger) == "known"


async def test_a_started_vm_that_its_service_has_forgotten_is_lost_and_not_gone(
    service: FakeRemoteService, ledger: FakeLedger, caplog: pytest.LogCaptureFixture
) -> None:
    lost: list[str] = []

    vm = RemoteHypervisor(ledger=ledger, on_lost=lost.append)
    await vm.create(config(service))
    await vm.start()
    service.crash()
    service.open()  # restarted: it has no VMs
    await vm.stop()

    assert lost == [VM]
    assert [lost.id for lost in lost_vms()] == [VM]
    assert ledger.history[-2][1].detail["state"] == "lost"
    assert ledger.held == {}
    assert [record.levelname for record in caplog.records if "lost" in record.message] == ["WARNING"]


@pytest.mark.parametrize("method", ["CreateVM", "StartVM"])
async def test_a_vm_whose_start_was_never_sent_is_not_lost(
    service: FakeRemoteService, ledger: FakeLedger, method: str
) -> None:
    vm = RemoteHypervisor(ledger=ledger, settle_s=0)
    if method == "StartVM":
        await vm.create(config(service))
    service.crash()
    with pytest.raises(Unavailable):
        await (vm.start() if method == "StartVM" else vm.create(config(service)))
    service.open()
    await vm.stop()

    assert (lost_vms(), ledger.held) == ((), {})
