"""The points themselves: their names, the variable's grammar, and that none of them is in production's way."""

import ast
import asyncio
import inspect
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from protos.agent import agent_pb2
from pyshim.agent import client
from pyshim.concurrency.deadlines import within_s
from pyshim.concurrency.undo import Undo
from pyshim.model.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument
from pyshim.model.ledger import LedgerEntry, ResourceKind
from tests.failpoints.points import AGENT_CALLS, Action, Failpoints, Fault, parse, points, steps
from tests.failpoints.wrapping import seam
from tests.fakes.ledger import FakeLedger

ROOT = Path(__file__).resolve().parents[3]


def test_the_variable_is_read_in_full() -> None:
    text = "hypervisor.start:before=error, ledger.acquire.mount:after#3=kill,agent.CreateContainer:before=delay(1.5)"

    assert parse(text) == (
        Fault("hypervisor.start:before", 1, Action.ERROR, 0),
        Fault("ledger.acquire.mount:after", 3, Action.KILL, 0),
        Fault("agent.CreateContainer:before", 1, Action.DELAY, 1.5),
    )


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("hypervisor.start=error", "expected POINT=ACTION"),
        ("hypervisor.start:during=error", "expected POINT=ACTION"),
        ("hypervisor.fly:before=error", "no such point"),
        ("hypervisor.start:before=explode", "actions there are cancel, delay, error, hang, kill"),
        ("hypervisor.start:before#0=error", "expected POINT=ACTION"),
        ("hypervisor.start:before=delay", "has seconds"),
        ("hypervisor.start:before=error(3)", "has seconds"),
        ("records.save:before=hang", "actions there are delay, error, kill"),
        ("publisher.publish:before=error", "actions there are delay, kill"),
    ],
)
def test_what_is_no_fault_is_refused_by_name(text: str, cause: str) -> None:
    with pytest.raises(InvalidArgument, match=cause) as refused:
        parse(text)

    assert repr(text) in str(refused.value)


def test_the_command_lists_every_point() -> None:
    command = (sys.executable, "-m", "tests.failpoints")
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout.split()

    assert tuple(listed) == points()
    assert {"hypervisor.start:before", "ledger.acquire.mount:after", "agent.CreateContainer:before"} <= set(listed)


def test_every_call_the_shim_makes_of_the_agent_has_points() -> None:
    service = {method.name for method in agent_pb2.DESCRIPTOR.services_by_name["AgentService"].methods} | {"Check"}
    words = {node.value for node in ast.walk(ast.parse(inspect.getsource(client))) if isinstance(node, ast.Constant)}

    assert words & service == set(AGENT_CALLS)


def test_production_does_not_even_import_the_points() -> None:
    program = "import sys, pyshim.serve; print(sorted(name for name in sys.modules if 'failpoints' in name))"
    done = subprocess.run(
        (sys.executable, "-c", program), cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )

    assert done.stdout.strip() == "[]"


async def test_an_undo_that_hangs_is_named_and_the_others_are_still_done(fast_clock: None) -> None:
    done = []

    class Ledger:
        async def release(self, entry: LedgerEntry) -> None:
            if entry.key == "/dead":
                await asyncio.get_running_loop().create_future()
            done.append(entry.key)

    undo = Undo("sandbox 'a'")
    for key in ("/first", "/dead", "/last"):
        undo.push(Ledger().release, LedgerEntry(kind=ResourceKind.MOUNT, key=key))
    error = await undo.run()
    assert isinstance(error, DeadlineExceeded)
    assert str(error) == "release mount '/dead': not done within 10 s"
    assert done == ["/last", "/first"]


class _Neighbour:
    def __init__(self) -> None:
        self.starts = 0

    @within_s(3, "start neighbour")
    async def start(self) -> None:
        self.starts += 1


@pytest.mark.parametrize(("moment", "starts"), [("before", 0), ("after", 1)])
async def test_what_hangs_at_a_point_hangs_within_the_deadline_of_its_call(
    moment: str, starts: int, fast_clock: None
) -> None:
    neighbour = _Neighbour()
    faulty = seam(Failpoints(parse(f"hypervisor.start:{moment}=hang")), "hypervisor", neighbour)

    with pytest.raises(DeadlineExceeded, match="start neighbour: not done within 3 s"):
        await faulty.start()
    assert neighbour.starts == starts


@pytest.mark.parametrize(("moment", "starts"), [("before", 0), ("after", 1)])
async def test_a_fault_comes_before_the_effect_or_after_it_and_only_once(moment: str, starts: int) -> None:
    neighbour = _Neighbour()
    faulty = seam(Failpoints(parse(f"hypervisor.start:{moment}=error")), "hypervisor", neighbour)

    with pytest.raises(FailedPrecondition, match=f"failpoint hypervisor.start:{moment}: injected error"):
        await faulty.start()
    assert neighbour.starts == starts

    await faulty.start()
    assert neighbour.starts == starts + 1


@pytest.mark.parametrize(
    ("point", "held"), [("mount:before", 0), ("directory:before", 0), ("directory:after", 3), ("mount:after", 3)]
)
def test_intents_written_at_once_pass_the_points_of_each_of_their_kinds_once(point: str, held: int) -> None:
    ledger = FakeLedger()
    faults = Failpoints(parse(f"ledger.acquire.{point}=error"))
    kinds = (ResourceKind.MOUNT, ResourceKind.DIRECTORY, ResourceKind.MOUNT)
    entries = [LedgerEntry(kind=kind, key=f"/{number}") for number, kind in enumerate(kinds)]

    with pytest.raises(FailedPrecondition, match=f"failpoint ledger.acquire.{point}: injected error"):
        seam(faults, "ledger", ledger).acquire(*entries)
    assert len(ledger.held) == held

    seam(faults, "ledger", ledger).acquire(*entries)
    assert faults.hits["ledger.acquire.mount:before"] == 2


def test_kill_is_kill_9() -> None:
    program = (
        "import asyncio; from tests.failpoints.points import Failpoints, parse; "
        "faults = Failpoints(parse('hypervisor.start:before=kill')); "
        "asyncio.run(faults.reach('hypervisor.start:before')); print('alive')"
    )
    done = subprocess.run((sys.executable, "-c", program), cwd=ROOT, capture_output=True, timeout=60, check=False)

    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"")


def test_a_hang_is_refused_for_calls_without_a_wait() -> None:
    assert Action.HANG not in steps()["ledger.acquire.mount"].actions()
    assert Action.HANG in steps()["ledger.release.mount"].actions()
