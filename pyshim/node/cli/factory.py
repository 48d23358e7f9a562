"""`pyshim factory init|status|destroy`: the templates that VMs of this node continue from, with Kata's verbs."""

import asyncio
import logging
import os
import time
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from uuid import uuid4

import click
import msgspec

from hypervisors.qemu.vm import QemuVm
from pyshim.agent.client import AgentClient
from pyshim.agent.connect import Connector
from pyshim.cleanup.release import release
from pyshim.config.load import load_config
from pyshim.config.sources import named_file
from pyshim.host.processes.children import Children
from pyshim.host.processes.identity import our_pid_namespace
from pyshim.host.processes.stat import start_ticks_of
from pyshim.log import set_up
from pyshim.model.config import Config
from pyshim.model.errors import FailedPrecondition, NotFound, ShimError
from pyshim.model.ids import SandboxId
from pyshim.model.places import REGISTER, VM_ROOT
from pyshim.model.plans import SandboxPlan
from pyshim.model.units import MIB
from pyshim.model.vm import LocalVm
from pyshim.node.cli.dry_run import empty_pod
from pyshim.node.cli.listing import age_text
from pyshim.node.cli.output import config_option, examples, json_option, print_json, print_table
from pyshim.node.install.handlers import config_path_of
from pyshim.pod.template import make_template
from pyshim.resources.linux import LinuxHost
from pyshim.resources.templates.plan import StoredTemplate, reason_to_boot, template_key, template_vm
from pyshim.resources.templates.store import TemplateDamaged, TemplateStore, machine_facts, write_record
from pyshim.state.records import SandboxRecords
from pyshim.state.schema import ShimRecord
from pyshim.state.store import StateStore

log = logging.getLogger(__name__)

_NOT_ENABLED = "templates are not enabled: enable_template in [factory] of '{source}'"
_WARM = "pykata-warm"
"""The installed handler whose configuration enables them."""


@click.group(
    epilog=examples("pyshim factory init", "pyshim factory status", "pyshim factory destroy"),
)
def command() -> None:
    """Make, list and remove templates: machines that have booted, which new pods' VMs continue from.

    Off unless the configuration has enable_template = true in its table [factory].
    """


@command.command("init")
@config_option
@click.option("--lock", "lock_fd", type=int, hidden=True)
def _init(config_path: str | None, lock_fd: int | None) -> int:
    """Boot the machine of the configuration once, and save it; a template that is there already is kept."""
    config = _config(config_path)
    if not config.factory.enable_template:
        raise FailedPrecondition(f"make template: {_NOT_ENABLED.format(source=config.source)} {_warm_hint()}")
    if lock_fd is None:
        _make_missing(config, TemplateStore(config.factory.template_path).locked())
    elif not os.fork():
        _make_for_shim(config)
    return 0


def _warm_hint() -> str:
    path = config_path_of(_WARM)
    if os.path.exists(path):
        return f"(hint: pyshim factory init --config {path})"
    return f"(hint: 'pyshim install' gives the handler {_WARM} a configuration with it, '{path}')"


def _make_for_shim(config: Config) -> None:
    """In the background, with the log and the lock of the shim that asks: both are descriptors of ours."""
    os.setsid()
    set_up(debug=False)
    try:
        _make_missing(config, nullcontext())
    except (ShimError, OSError) as error:
        log.warning("no template made", extra={"config": config.source, "error": str(error)})


def _make_missing(config: Config, lock: AbstractContextManager[object]) -> None:
    plan, vm = _planned(config)
    if reason := reason_to_boot(vm, vm):
        raise FailedPrecondition(f"make template for '{config.source}': a VM of it has to boot: {reason}")
    facts = machine_facts(vm)
    key = template_key(vm, facts)
    store = TemplateStore(config.factory.template_path)
    try:
        print(f"template {key} is there already: {store.find(key)}")
        return
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
    print(f"template {key} made: {config.factory.template_path}/{key}")


async def _make(plan: SandboxPlan, vm: LocalVm, key: str, directory: str) -> None:
    sandbox_id = SandboxId(f"template-{key[:12]}")
    children = Children()
    shim = ShimRecord(
        pid=os.getpid(),
        start_ticks=start_ticks_of(os.getpid()),
        socket="",
        namespace="",
        pid_namespace=our_pid_namespace(),
    )
    host = LinuxHost(children=children, release=release)
    records = SandboxRecords(
        store=StateStore(register=REGISTER), sandbox_id=sandbox_id, shim=shim, release=host.release
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


@command.command("status")
@config_option
@json_option
def _status(config_path: str | None, as_json: bool) -> int:
    """List the templates: which one new pods' VMs continue from, sizes, ages, and what cannot be used, and why."""
    config = _config(config_path)
    current = ""
    if config.factory.enable_template:
        _, vm = _planned(config)
        current = template_key(vm, machine_facts(vm))
    found = tuple(TemplateStore(config.factory.template_path).all())
    usable = [each for each in found if isinstance(each, StoredTemplate)]
    damaged = [str(each) for each in found if not isinstance(each, StoredTemplate)]
    if as_json:
        templates = msgspec.to_builtins(usable)
        enabled = config.factory.enable_template
        print_json({"enabled": enabled, "key": current, "templates": templates, "damaged": damaged})
        return 0
    if not config.factory.enable_template:
        print(_NOT_ENABLED.format(source=config.source))
    elif all(each.template.key != current for each in usable):
        print(f"VMs of '{config.source}' boot: there is no template {current} (hint: 'pyshim factory init')")
    if usable:
        print_table(HEADINGS, [_row(each, current) for each in usable])
    for line in damaged:
        print(line)
    return 0


HEADINGS = ("TEMPLATE", "CURRENT", "AGE", "USED", "SIZE", "VM", "KERNEL")


def _row(stored: StoredTemplate, current: str) -> tuple[str, ...]:
    template, now_s = stored.template, time.time()
    return (
        template.key,
        "yes" if template.key == current else "no",
        age_text(int(now_s - template.made_ns / 1e9)),
        f"{age_text(int(now_s - stored.used_ns / 1e9))} ago",
        f"{stored.used_bytes // MIB}Mi",
        f"{template.vcpus} / {template.memory_mib}Mi",
        template.kernel,
    )


@command.command("destroy")
@config_option
def _destroy(config_path: str | None) -> int:
    """Remove all templates. Pods that run keep running: each has a copy of its own."""
    root = _config(config_path).factory.template_path
    print(f"{TemplateStore(root).discard_all()} templates removed from '{root}'")
    return 0


def _planned(config: Config) -> tuple[SandboxPlan, LocalVm]:
    """An empty pod, and the VM that it would continue with."""
    plan = empty_pod(config)
    if plan.warm_vm is None:
        raise FailedPrecondition(f"plan template for '{config.source}': its VMs are not of this host")
    return plan, plan.warm_vm


def _config(path: str | None) -> Config:
    return load_config(named_file(path), {}, dict(os.environ))
