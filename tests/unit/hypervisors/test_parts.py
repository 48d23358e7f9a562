"""The driver's small parts: verdicts on an end, CIDs, bridge slots, names, the console's bounds."""

import asyncio
import errno
import os
import socket
from pathlib import Path

import pytest

from hypervisors.qemu.console import MAX_FILE_BYTES, MAX_SHOWN_CHARS, Console
from hypervisors.qemu.options import node_name
from hypervisors.qemu.pci import BridgeSlots
from hypervisors.qemu.process import SHOWN_LINES, ExitFacts, vm_exit
from hypervisors.qemu.vsock import FIRST_CID, LAST_CID, candidate_cids, reserve_cid
from pyshim.model.architecture import MACHINE_TYPES
from pyshim.model.errors import FailedPrecondition, ResourceExhausted
from pyshim.model.vm import VmExitKind
from tests.fakes.open_files import same_open_files

PANIC = ("[ 1.0] Kernel panic - not syncing: VFS: Unable to mount root fs",)


@pytest.mark.parametrize(
    ("facts", "kind", "text"),
    [
        pytest.param(
            {"stop_requested": True, "panic_event": True}, VmExitKind.REQUESTED, "was stopped", id="requested"
        ),
        pytest.param({"panic_event": True}, VmExitKind.GUEST_PANIC, "panicked; its console is empty", id="event"),
        pytest.param({"shutdown_cause": "guest-panic"}, VmExitKind.GUEST_PANIC, "panicked", id="cause"),
        pytest.param(
            {"shutdown_cause": "guest-reset", "console": PANIC}, VmExitKind.GUEST_PANIC, "Unable to mount", id="console"
        ),
        pytest.param(
            {"shutdown_cause": "guest-shutdown", "console": PANIC},
            VmExitKind.GUEST_SHUTDOWN,
            "powered off",
            id="power-off-after-a-survived-panic-text",
        ),
        pytest.param({"shutdown_cause": "guest-reset"}, VmExitKind.GUEST_SHUTDOWN, "the guest reset", id="reset"),
        pytest.param(
            {"process_exit": "qemu (pid 1) was killed by SIGKILL"}, VmExitKind.VMM_DIED, "by SIGKILL;", id="killed"
        ),
        pytest.param(
            {"process_exit": "qemu (pid 1) exited with status 0", "shutdown_cause": "host-signal"},
            VmExitKind.VMM_DIED,
            "status 0 (host-signal)",
            id="terminated",
        ),
        pytest.param(
            {"lost_control": "lost control", "process_exit": "qemu was killed", "shutdown_cause": "guest-reset"},
            VmExitKind.VMM_DIED,
            "lost control; qemu was killed",
            id="uncontrolled",
        ),
    ],
)
def test_the_end_of_a_vm_has_kind_and_reason(facts: dict[str, object], kind: VmExitKind, text: str) -> None:
    ended = vm_exit("pod1", ExitFacts(**facts))  # type: ignore[arg-type]

    assert ended.kind is kind
    assert ended.reason.startswith("vm 'pod1'")
    assert text in ended.reason


def test_the_reason_has_only_the_last_console_lines() -> None:
    console = tuple(f"line {number}" for number in range(50))

    reason = vm_exit("pod1", ExitFacts(console=console)).reason

    assert reason.count("line ") == SHOWN_LINES
    assert reason.endswith("line 49")


def test_the_reason_of_a_panic_has_its_message_not_the_end_of_its_trace() -> None:
    console = ("early", "a", "b", "why", *PANIC, *(f"trace {number}" for number in range(40)))

    reason = vm_exit("pod1", ExitFacts(console=console, panic_event=True)).reason

    assert "last console lines:\na\nb\nwhy\n[ 1.0] Kernel panic" in reason
    assert reason.endswith("trace 10")


def test_cid_in_use_leads_to_the_next_and_the_descriptor_holds_it() -> None:
    asked: list[int] = []

    def set_cid(_fd: int, cid: int) -> None:
        asked.append(cid)
        if cid < 12:
            raise OSError(errno.EADDRINUSE, "in use")

    fd, cid = reserve_cid(device="/dev/null", set_cid=set_cid, start=10)

    assert (cid, asked, fd.is_open) == (12, [10, 11, 12], True)
    fd.close()


def test_cids_stay_within_what_a_guest_may_have() -> None:
    for start in (FIRST_CID, LAST_CID):
        cids = list(candidate_cids(start))

        assert cids[0] == start
        assert len(set(cids)) == len(cids) > 900
        assert min(cids) >= FIRST_CID
        assert max(cids) <= LAST_CID


@pytest.mark.parametrize(
    ("number", "error", "text"),
    [
        pytest.param(errno.EADDRINUSE, ResourceExhausted, "none free near 5", id="all-taken"),
        pytest.param(errno.ENOTTY, FailedPrecondition, "set guest cid 5 on '/dev/null': ENOTTY", id="wrong-device"),
    ],
)
def test_no_cid_leaves_no_descriptor(number: int, error: type[Exception], text: str) -> None:
    def refuse(_fd: int, _cid: int) -> None:
        raise OSError(number, os.strerror(number))

    with same_open_files(), pytest.raises(error, match=text):
        reserve_cid(device="/dev/null", set_cid=refuse, start=5)


def test_the_first_free_slot_is_taken_and_a_freed_one_again() -> None:
    slots = BridgeSlots(MACHINE_TYPES["q35"], 2)
    taken = [slots.take(f"d{number}") for number in range(31)]

    assert (taken[0], taken[29], taken[30]) == ((0, 1), (0, 30), (1, 1))
    slots.free("d4")
    assert slots.take("again") == (0, 5)
    assert slots.saved()[1] == {"DeviceAddr": {"1": "d30"}, "Type": "pci", "ID": "pci-bridge-1", "Addr": 3}


def test_full_bridges_are_an_error() -> None:
    slots = BridgeSlots(MACHINE_TYPES["q35"], 1)
    for number in range(30):
        slots.take(f"d{number}")

    with pytest.raises(ResourceExhausted, match="plug 'x': no free slot on 1 PCI bridge"):
        slots.take("x")


@pytest.mark.parametrize("device_id", ["", "9lives", "a" * 32, "a b", "a,b=c", "ümlaut", "../x"])
def test_an_id_that_qemu_refuses_gets_a_name_with_its_hash(device_id: str) -> None:
    name = node_name(device_id)

    assert name.startswith("id-")
    assert len(name) <= 31
    assert name == node_name(device_id) != node_name(device_id + "x")


@pytest.mark.parametrize("device_id", ["drive-1", "a" * 31, "eth0.100", "X_y"])
def test_an_id_that_qemu_accepts_is_its_name(device_id: str) -> None:
    assert node_name(device_id) == device_id


def on_console(tmp_path: Path, *outputs: bytes) -> tuple[Console, tuple[str, ...]]:
    """A console that has read `outputs`, one per channel, to their ends."""

    async def body() -> tuple[Console, tuple[str, ...]]:
        console = Console(log_path=str(tmp_path / "console.log"), to_log=False)
        for output in outputs:
            ours, theirs = socket.socketpair()
            console.attach(ours)
            theirs.sendall(output)
            theirs.close()
        console.drain()
        console.close()
        return console, console.lines()

    return asyncio.run(body(), debug=True)


def test_the_first_channel_with_output_is_the_tail(tmp_path: Path) -> None:
    assert on_console(tmp_path, b"", b"serial\n")[1] == ("serial",)
    assert on_console(tmp_path, b"hvc\n", b"serial\n")[1] == ("hvc",)
    assert (tmp_path / "console.log").read_text() == "hvc\nserial\n"


def test_a_channel_that_shows_a_panic_comes_first(tmp_path: Path) -> None:
    lines = on_console(tmp_path, b"agent: all is well\n", b"Kernel panic - not syncing: x\n---[ end ]---\n")[1]

    assert lines == ("Kernel panic - not syncing: x", "---[ end ]---")


def test_shown_lines_are_cut_and_the_file_is_not(tmp_path: Path) -> None:
    lines = on_console(tmp_path, b"x" * 1000 + b"\n")[1]

    assert [len(line) for line in lines] == [MAX_SHOWN_CHARS]
    assert (tmp_path / "console.log").stat().st_size == 1001


def test_an_error_of_the_log_does_not_stop_the_console(tmp_path: Path) -> None:
    (tmp_path / "vm").mkdir()
    console = Console(log_path=str(tmp_path / "vm" / "console.log"), to_log=False)
    (tmp_path / "vm" / "console.log").unlink()
    (tmp_path / "vm").rmdir()

    for _ in range(MAX_FILE_BYTES // 1000 + 2):
        console.write_line("x" * 1000)
    console.close()
