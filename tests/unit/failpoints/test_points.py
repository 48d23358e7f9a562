"""Every call of the agent has points, and an undo that hangs at one is left behind."""

import ast
import asyncio
import inspect
from pathlib import Path

from protos.agent import agent_pb2
from pyshim.agent import client
from pyshim.concurrency.undo import Undo
from pyshim.model.errors import DeadlineExceeded
from pyshim.model.ledger import LedgerEntry, ResourceKind
from tests.failpoints.points import AGENT_CALLS

ROOT = Path(__file__).resolve().parents[3]


def test_every_call_the_shim_makes_of_the_agent_has_points() -> None:
    service = {method.name for method in agent_pb2.DESCRIPTOR.services_by_name["AgentService"].methods} | {"Check"}
    words = {node.value for node in ast.walk(ast.parse(inspect.getsource(client))) if isinstance(node, ast.Constant)}

    assert words & service == set(AGENT_CALLS)


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
