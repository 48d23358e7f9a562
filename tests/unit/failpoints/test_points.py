"""The points themselves: their names, the variable's grammar, and that none of them is in production's way."""

import ast
import asyncio
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from protos.agent import agent_pb2
from pyshim.agent import client
from pyshim.concurrency.deadlines import within_s
from pyshim.concurrency.undo import Undo
from pyshim.model.errors import DeadlineExceeded
from pyshim.model.ledger import LedgerEntry, ResourceKind
from tests.failpoints.points import AGENT_CALLS, Failpoints, parse
from tests.failpoints.wrapping import seam

ROOT = Path(__file__).resolve().parents[3]


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
