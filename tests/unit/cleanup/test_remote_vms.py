"""The end of a remote VM by a clean-up after its shim, against a service in threads."""

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pyshim.cleanup import remote_vms
from pyshim.cleanup.lost_vms import lost_vms, remove_tombstone
from pyshim.cleanup.remote_vms import USUAL_PATIENCE_S, patience_s
from pyshim.cleanup.undo import undo_entries, undo_entry
from pyshim.model.errors import FailedPrecondition, ShimError, Unavailable
from pyshim.model.ledger import LedgerEntry, ResourceKind
from pyshim.model.remote_vms import MAX_REPLY_BYTES, RemoteVmState, is_unknown_vm, remote_vm_entry
from pyshim.ttrpc import Code
from tests.fakes.remote_service import Behaviour, Call, FakeRemoteService, done_unsaid, hang_up, never
from tests.fakes.unix_sockets import crowded

VM = "pod1"
PATIENCE_S = 60


@pytest.fixture
def service(tmp_path: Path) -> Iterator[FakeRemoteService]:
    with FakeRemoteService(str(tmp_path)) as service:
        service.vms[VM] = "running"
        yield service


@pytest.fixture(autouse=True)
def graves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of this test's tombstones."""
    monkeypatch.setattr("pyshim.cleanup.lost_vms.LOST_VMS", f"{tmp_path}/lost-vms")
    return tmp_path / "lost-vms"


def entry(service: FakeRemoteService, **changes: Any) -> LedgerEntry:
    detail: dict[str, Any] = {
        "socket_path": service.path,
        "state": RemoteVmState.KNOWN,
        "agent": service.agent_path,
        "asked_until_s": int(time.time()) + 3600,
        "stop_timeout_s": PATIENCE_S,
    }
    return remote_vm_entry(VM, **{**detail, **changes})


def end(held: LedgerEntry) -> None:
    undo_entry(held, timeout_s=patience_s(held))


def test_the_vm_is_stopped_and_a_second_time_finds_none(service: FakeRemoteService) -> None:
    end(entry(service))
    end(entry(service))

    assert service.methods() == ["StopVM", "StopVM"]
    assert service.vms == {}
    assert service.called("StopVM").timeout_s == 0


def test_one_that_was_stopped_already_needs_no_service(tmp_path: Path) -> None:
    undo_entry(entry(FakeRemoteService(str(tmp_path)), state=RemoteVmState.STOPPED), timeout_s=0.1)


def test_who_cannot_wait_for_the_answer_does_not_begin(service: FakeRemoteService) -> None:
    with pytest.raises(FailedPrecondition, match=r"'pod1'.* 60 s.*pyshim cleanup"):
        undo_entry(entry(service), timeout_s=5)

    assert service.calls == []


def test_a_started_vm_that_the_service_has_forgotten_leaves_a_tombstone(service: FakeRemoteService) -> None:
    service.vms.clear()

    end(entry(service, state=RemoteVmState.STARTED))

    assert service.methods() == ["StopVM"]
    (lost,) = lost_vms()
    assert (lost.id, lost.service, lost.agent) == (VM, service.path, service.agent_path)
    assert abs(lost.found_s - time.time()) < 3600
    assert remove_tombstone(VM)
    assert not remove_tombstone(VM)
    assert lost_vms() == ()


@pytest.mark.parametrize("state", [RemoteVmState.STARTED, RemoteVmState.KNOWN, RemoteVmState.STOPPED])
def test_a_vm_that_was_stopped_leaves_none(service: FakeRemoteService, state: RemoteVmState) -> None:
    end(entry(service, state=state))

    assert lost_vms() == ()


def test_a_vm_that_the_shim_knew_to_be_lost_gets_its_tombstone_without_a_call(service: FakeRemoteService) -> None:
    undo_entry(entry(service, state=RemoteVmState.LOST), timeout_s=0.1)

    assert [lost.id for lost in lost_vms()] == [VM]
    assert service.calls == []


def test_a_tombstone_that_cannot_be_written_keeps_the_vm_on_record(service: FakeRemoteService, graves: Path) -> None:
    graves.touch()

    with pytest.raises(FailedPrecondition, match=r"release remote-vm 'pod1': .*exists"):
        undo_entry(entry(service, state=RemoteVmState.LOST), timeout_s=0.1)


def test_a_damaged_tombstone_still_says_which_vm(graves: Path) -> None:
    graves.mkdir()
    (graves / "x").write_bytes(b"{")
    (graves / "y").write_bytes(b'{"id": "other", "found_s": "soon"}')

    assert [lost.id for lost in lost_vms()] == ["x", "y"]


@pytest.mark.parametrize("length", [1, 127, 128, 300])
def test_ids_of_every_length_arrive(service: FakeRemoteService, length: int) -> None:
    name = "x" * length
    service.vms[name] = "running"
    held = entry(service)

    end(LedgerEntry(kind=held.kind, key=name, detail=held.detail))

    assert service.called("StopVM").id == name
    assert name not in service.vms


def test_a_creation_without_a_known_outcome_is_waited_for(
    service: FakeRemoteService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`No such VM` proves nothing while CreateVM may be under way: here it takes effect after the first StopVM."""
    monkeypatch.setattr(remote_vms, "PAUSE_S", 0.01)
    service.vms.clear()

    def made_later(call: Any) -> None:
        call.do()
        service.vms[VM] = "created"

    service.behave["StopVM"] = lambda call: made_later(call) if len(service.calls) == 1 else call.do()

    end(entry(service, state=RemoteVmState.ASKED))

    assert service.methods() == ["StopVM", "StopVM"]
    assert service.vms == {}


def test_a_creation_whose_time_is_over_has_made_nothing(service: FakeRemoteService) -> None:
    service.vms.clear()

    end(entry(service, state=RemoteVmState.ASKED, asked_until_s=int(time.time()) - 1))

    assert service.methods() == ["StopVM"]


def test_a_creation_that_may_still_be_under_way_stays_on_record(service: FakeRemoteService) -> None:
    service.vms.clear()

    with pytest.raises(FailedPrecondition, match="may still be making it"):
        end(entry(service, state=RemoteVmState.ASKED, stop_timeout_s=1))


def gibberish(call: Call) -> None:
    call.send(b"\0" * 64)
    call.hang_up()


def long(call: Call) -> None:
    call.send(call._core.response(call._stream_id, b"\x12\x00" * MAX_REPLY_BYTES))


FAILURES: dict[str, tuple[Behaviour, type[ShimError], str]] = {
    "hangs up": (hang_up, Unavailable, "closed the connection"),
    "carried out unsaid": (done_unsaid, Unavailable, "closed the connection"),
    "never answers": (never, Unavailable, "has not answered"),
    "error": (lambda call: call.fail(Code.INTERNAL, "no\ncredentials"), FailedPrecondition, "says: no credentials"),
    "long": (long, Unavailable, "reply of .* exceeds the limit"),
    "not a frame": (gibberish, Unavailable, "closed the connection"),
}


@pytest.mark.parametrize(("behaviour", "error", "words"), FAILURES.values(), ids=FAILURES)
def test_what_is_not_answered_stays_on_record(
    service: FakeRemoteService, behaviour: Behaviour, error: type[ShimError], words: str
) -> None:
    service.behave["StopVM"] = behaviour

    with pytest.raises(error, match=words):
        end(entry(service, stop_timeout_s=1 if behaviour is never else PATIENCE_S))


def test_a_service_that_says_no_end_of_other_things_is_not_heard_for_ever(service: FakeRemoteService) -> None:
    def babble(call: Call) -> None:
        with contextlib.suppress(OSError):
            while True:
                call._sock.sendall(b"\0" * (4 << 20))

    service.behave["StopVM"] = babble

    with pytest.raises(Unavailable, match="has not answered"):
        end(entry(service, stop_timeout_s=1))


def test_a_service_with_a_full_listen_queue_is_waited_for(service: FakeRemoteService) -> None:
    service.close()
    with crowded(service.path):
        opening = threading.Timer(0.3, service.open)
        opening.start()
        end(entry(service))
        opening.join()

    assert service.vms == {}


def test_a_service_that_is_away_is_an_error_that_names_it(tmp_path: Path) -> None:
    absent = FakeRemoteService(str(tmp_path))

    with pytest.raises(Unavailable, match=f"release remote-vm 'pod1': remote hypervisor '{absent.path}': No such file"):
        end(entry(absent))


class Clock:
    """In the place of the module `time`; it is read, then turned on by hand."""

    def __init__(self) -> None:
        self.now_s = time.monotonic()

    def monotonic(self) -> float:
        return self.now_s


def test_a_replay_waits_for_the_vm_and_still_undoes_the_rest(
    service: FakeRemoteService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others' deadline is not used up by a service that takes its time."""
    directory = tmp_path / "vm"
    directory.mkdir()
    clock = Clock()
    monkeypatch.setattr("pyshim.cleanup.undo.time", clock)

    def slow(call: Call) -> None:
        clock.now_s += 10 * PATIENCE_S
        call.do()

    service.behave["StopVM"] = slow
    ledger = (LedgerEntry(kind=ResourceKind.DIRECTORY, key=str(directory)), entry(service))
    errors: list[str] = []

    held = undo_entries(
        ledger, deadline=clock.now_s + PATIENCE_S, one_timeout_s=PATIENCE_S, errors=errors, check=lambda _entry: None
    )

    assert (held, errors, service.vms) == ((), [], {})
    assert not directory.exists()


@pytest.mark.parametrize("detail", [{}, {"stop_timeout_s": "x"}, {"stop_timeout_s": 0}], ids=str)
def test_an_entry_that_says_nothing_usable_has_the_usual_patience(detail: dict[str, Any]) -> None:
    assert patience_s(LedgerEntry(kind=ResourceKind.REMOTE_VM, key=VM, detail=detail)) == USUAL_PATIENCE_S


UNKNOWN = [
    (Code.NOT_FOUND, "whatever", True),
    (Code.UNKNOWN, "stopping VM: sandbox pod1 does not exist", True),
    (Code.UNKNOWN, "sandbox 'pod1' not found", True),
    (Code.UNKNOWN, 'vm "pod1": not found', True),
    (Code.UNKNOWN, "sandbox pod12 does not exist", False),
    (Code.UNKNOWN, "stop pod1: lookup api.cloud: no such host", False),
    (Code.UNKNOWN, "stop pod1: credentials not found", False),
    (Code.UNKNOWN, "stopping VM: resource group rg-pod1 not found", False),
    (Code.UNKNOWN, "volume web.pod1 does not exist", False),
    (Code.INTERNAL, "sandbox pod1 does not exist", False),
    (Code.UNAVAILABLE, "pod1 does not exist", False),
]


@pytest.mark.parametrize(("code", "message", "is_unknown"), UNKNOWN)
def test_only_an_answer_about_the_vm_itself_says_that_it_is_unknown(code: int, message: str, is_unknown: bool) -> None:
    assert is_unknown_vm(VM, code, message) is is_unknown
