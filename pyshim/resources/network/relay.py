"""Runs the relay in the guest: for connections and queries, or as the first process of a pid namespace
(`plan/relay.py`).
"""

import asyncio
import logging
from contextlib import suppress

from pyshim.model.errors import NotFound, ShimError
from pyshim.model.seams import ContainerAgent, Host
from pyshim.resources.network.plan.relay import BUILT_PROGRAM, MAX_PROGRAM_BYTES, RelayPlan, relay_plan
from pyshim.resources.services import VmServices

log = logging.getLogger(__name__)

REMOVE_TIMEOUT_S = 3


class GuestRelay:
    """The container of the shim's own in the guest whose processes carry connections and queries."""

    def __init__(self, services: VmServices, agent: ContainerAgent) -> None:
        self._plan = services.plan
        self._host = services.host
        self._agent = agent
        self._making = asyncio.Lock()
        self._container_id = ""

    async def container(self) -> str:
        """Its id; it runs. It is made for the first call."""
        async with self._making:
            if not self._container_id:
                relay = relay_plan(self._plan.sandbox_id, self._plan.share)
                timeout_s = self._plan.config.runtime.create_container_timeout_s
                await run_relay(relay, host=self._host, agent=self._agent, timeout_s=timeout_s)
                log.info("relay made ready in the guest", extra={"container": relay.guest.container_id})
                self._container_id = relay.guest.container_id
            return self._container_id


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
