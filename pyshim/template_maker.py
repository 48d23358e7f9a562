"""Makes a template of the VM of an empty pod; composes real adapters for that, as `serve.py` does for a shim.

The command `pyshim factory` calls `make_missing`. A shim whose VM could have continued from a template runs `main` in a
process of its own, which may end after the sandbox.
"""

import asyncio
import logging
import os
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Protocol
from uuid import uuid4

from hypervisors.base import Hypervisor
from hypervisors.qemu.vm import QemuVm
from pyshim.agent.client import AgentClient
from pyshim.agent.connect import Connector
from pyshim.cleanup.undo import undo_entry
from pyshim.concurrency.tasks import while_alive
from pyshim.config.load import load_config
from pyshim.config.sources import named_file
from pyshim.dry_run import empty_pod
from pyshim.host.processes.children import Children
from pyshim.log import set_up
from pyshim.model.config import Config
from pyshim.model.errors import FailedPrecondition, NotFound, ShimError
from pyshim.model.ids import SandboxId
from pyshim.model.places import REGISTER, VM_ROOT
from pyshim.model.plans import SandboxPlan
from pyshim.model.seams import AgentConnector
from pyshim.model.vm import LocalVm
from pyshim.resources.linux import LinuxHost
from pyshim.resources.templates.plan import reason_to_boot, template_key, template_vm
from pyshim.resources.templates.store import TemplateDamaged, TemplateStore, machine_facts, write_record
from pyshim.state.records import SandboxRecords, own_record
from pyshim.state.store import StateStore

log = logging.getLogger(__name__)

SETTLE_S = 2.0
"""Seconds from the end of the connection to the stop of the guest, which must notice that end. Kata waits as long."""


class SavableVm(Hypervisor, Protocol):
    async def save_machine(self, directory: str) -> None:
        """The running VM is saved in `directory`, and does not run on."""


def main(source: str) -> None:
    """A child has begun to make the template of the configuration file `source`.

    The log and the lock on the templates are descriptors of the shim that asks. A failure goes to the log.
    """
    if os.fork():
        return
    os.setsid()
    set_up(debug=False)
    try:
        config = load_config(named_file(source), {}, dict(os.environ))
        if config.factory.enable_template:
            make_missing(config, nullcontext())
    except (ShimError, OSError) as error:
        log.warning("no template made", extra={"config": source, "error": str(error)})


def make_missing(config: Config, lock: AbstractContextManager[object]) -> str:
    """A template for the VMs of `config` is in its directory; the text says whether it was made now.

    Raises ShimError and OSError, Unavailable among them while another process has the `lock`.
    """
    plan, vm = planned(config)
    if reason := reason_to_boot(vm, vm):
        raise FailedPrecondition(f"make template for '{config.source}': a VM of it has to boot: {reason}")
    facts = machine_facts(vm)
    key = template_key(vm, facts)
    store = TemplateStore(config.factory.template_path)
    try:
        return f"template {key} is there already: {store.find(key)}"
    except (NotFound, TemplateDamaged):
        pass
    with lock:
        try:
            with store.making(key, vm.memory.boot_mib) as directory:
                asyncio.run(_make(plan, vm, key, directory))
                write_record(directory, key, vm, facts)
        except (ShimError, OSError) as error:
            store.note_trial(key, str(error))
            raise
    log.info("template made", extra={"template": f"{config.factory.template_path}/{key}"})
    return f"template {key} made: {config.factory.template_path}/{key}"


def planned(config: Config) -> tuple[SandboxPlan, LocalVm]:
    """An empty pod, and the VM that it would continue with. Raises FailedPrecondition for VMs of another host."""
    plan = empty_pod(config)
    if plan.warm_vm is None:
        raise FailedPrecondition(f"plan template for '{config.source}': its VMs are not of this host")
    return plan, plan.warm_vm


async def _make(plan: SandboxPlan, vm: LocalVm, key: str, directory: str) -> None:
    sandbox_id = SandboxId(f"template-{key[:12]}")
    children = Children()
    host = LinuxHost(children=children, undo_entry=undo_entry, template_maker=__name__)
    records = SandboxRecords(
        store=StateStore(register=REGISTER), sandbox_id=sandbox_id, shim=own_record(), undo=host.undo
    )
    try:
        await make_template(
            template_vm(vm, sandbox_id=sandbox_id, uuid=str(uuid4()), vm_dir=f"{VM_ROOT}/{sandbox_id}"),
            directory,
            hypervisor=QemuVm(children=children, ledger=records.ledger),
            connector=Connector(partial(AgentClient, request_timeout_s=plan.config.agent.request_timeout_s)),
            boot_timeout_s=plan.agent_timeout_s,
        )
    finally:
        await children.end_all()
        records.remove()


async def make_template(
    vm: LocalVm, directory: str, *, hypervisor: SavableVm, connector: AgentConnector, boot_timeout_s: float
) -> None:
    """The machine is saved in `directory` once its agent has answered, and its VM has ended. Raises ShimError.

    No client is connected to the agent at that moment. So the agent of each VM that continues from the template waits
    for its first client, and has served no pod.
    """
    try:
        await hypervisor.create(vm)
        await hypervisor.start()
        booted = _await_agent(hypervisor, connector, boot_timeout_s)
        await while_alive(booted, _end(hypervisor), action=f"boot vm '{vm.sandbox_id}'")
        await hypervisor.save_machine(directory)
    finally:
        await hypervisor.stop()


async def _await_agent(hypervisor: Hypervisor, connector: AgentConnector, boot_timeout_s: float) -> None:
    """The agent has answered, and has noticed that the connection ended."""
    await hypervisor.await_agent_device(boot_timeout_s)
    agent = await connector.connect(hypervisor.agent_address, boot_timeout_s)
    await agent.close()
    await asyncio.sleep(SETTLE_S)


async def _end(hypervisor: Hypervisor) -> str:
    return (await hypervisor.wait()).reason
