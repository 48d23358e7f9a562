"""Runs the relay in the guest: for connections, or as the first process of a pid namespace (`plan/relay.py`)."""

from contextlib import suppress

from pyshim.model.errors import NotFound, ShimError
from pyshim.model.seams import ContainerAgent, Host
from pyshim.resources.network.plan.relay import BUILT_PROGRAM, MAX_PROGRAM_BYTES, RelayPlan

REMOVE_TIMEOUT_S = 3


async def run_relay(relay: RelayPlan, *, host: Host, agent: ContainerAgent, timeout_s: float) -> None:
    """The container runs. Files made in the share are removed with it."""
    try:
        program = await host.read_bytes(BUILT_PROGRAM, MAX_PROGRAM_BYTES)
    except NotFound as exc:
        raise NotFound(f"{exc} (hint: 'make setup' builds it)") from exc
    for path in relay.directories:
        await host.make_directory(path, 0o755)
    await host.write_bytes(relay.program_path, program, 0o755)
    await agent.create_container(relay.guest, timeout_s)
    try:
        await agent.start_container(relay.guest.container_id)
    except BaseException:
        with suppress(ShimError):
            await agent.remove_container(relay.guest.container_id, REMOVE_TIMEOUT_S)
        raise
