"""Makes a template: boots a VM until its agent answers, and saves it.

No client is connected to the agent at that moment. So the agent of each VM that continues from the template waits for
its first client, and has served no pod.
"""

import asyncio
from typing import Protocol

from hypervisors.base import Hypervisor
from pyshim.model.seams import AgentConnector
from pyshim.model.vm import LocalVm

SETTLE_S = 2.0
"""Seconds from the end of the connection to the stop of the guest, which must notice that end. Kata waits as long."""


class SavableVm(Hypervisor, Protocol):
    async def save_machine(self, directory: str) -> None:
        """The running VM is saved in `directory`, and does not run on."""


async def make_template(
    vm: LocalVm, directory: str, *, hypervisor: SavableVm, connector: AgentConnector, boot_timeout_s: float
) -> None:
    """The machine is saved in `directory`, and its VM has ended. Raises ShimError."""
    try:
        await hypervisor.create(vm)
        await hypervisor.start()
        await hypervisor.await_agent_device(boot_timeout_s)
        agent = await connector.connect(hypervisor.agent_address, boot_timeout_s)
        await agent.close()
        await asyncio.sleep(SETTLE_S)
        await hypervisor.save_machine(directory)
    finally:
        await hypervisor.stop()
