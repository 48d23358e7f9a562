"""The health of sandboxes, as their shims report it. A shim asks its guest's agent first."""

import asyncio
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from pyshim.model.errors import FailedPrecondition, ShimError
from pyshim.model.observation import Health
from pyshim.node.cli.monitor_client import monitor_socket
from pyshim.node.cli.sandboxes import RUNS, SandboxRow
from pyshim.node.monitor.shim_client import shim_answer

ASK_S = 2.0
"""Seconds for a shim's answer; it gives the agent one."""


def with_health(found: Sequence[SandboxRow], state_dir: str) -> list[SandboxRow]:
    """The sandboxes, with the health of those that run. All shims are asked at the same time, for at most ASK_S."""

    async def ask() -> list[SandboxRow]:
        return list(await asyncio.gather(*(_with_health(each, state_dir) for each in found)))

    return asyncio.run(ask())


async def _with_health(sandbox: SandboxRow, state_dir: str) -> SandboxRow:
    if sandbox.health != RUNS:
        return sandbox
    try:
        text = await shim_answer(monitor_socket(state_dir, sandbox.id), "/health", within_s=ASK_S)
        answer = msgspec.json.decode(text, type=Health)
    except FailedPrecondition:
        return sandbox  # a shim of an older release has no such path
    except ShimError:
        return replace(sandbox, health="its shim does not answer")
    except msgspec.DecodeError:
        return replace(sandbox, health="its shim answers nonsense")
    return replace(sandbox, health=answer.problem or "ok", agent_age_s=answer.agent_age_s)
