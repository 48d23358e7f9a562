"""`pyshim factory init|status|destroy`: the templates that VMs of this node continue from, with Kata's verbs."""

import os
import time

import click
import msgspec

from pyshim.config.load import load_config
from pyshim.config.sources import named_file
from pyshim.model.config import Config
from pyshim.model.errors import FailedPrecondition
from pyshim.model.units import MIB
from pyshim.node.cli.listing import age_text
from pyshim.node.cli.output import config_option, examples, json_option, print_json, print_table
from pyshim.node.install.handlers import config_path_of
from pyshim.resources.templates.plan import StoredTemplate, template_key
from pyshim.resources.templates.store import TemplateStore, machine_facts
from pyshim.template_maker import make_missing, planned

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
def _init(config_path: str | None) -> int:
    """Boot the machine of the configuration once, and save it; a template that is there already is kept."""
    config = _config(config_path)
    if not config.factory.enable_template:
        raise FailedPrecondition(f"make template: {_NOT_ENABLED.format(source=config.source)} {_warm_hint()}")
    print(make_missing(config, TemplateStore(config.factory.template_path).locked()))
    return 0


def _warm_hint() -> str:
    path = config_path_of(_WARM)
    if os.path.exists(path):
        return f"(hint: pyshim factory init --config {path})"
    return f"(hint: 'pyshim install' gives the handler {_WARM} a configuration with it, '{path}')"


@command.command("status")
@config_option
@json_option
def _status(config_path: str | None, as_json: bool) -> int:
    """List the templates: which one new pods' VMs continue from, sizes, ages, and what cannot be used, and why."""
    config = _config(config_path)
    current = ""
    if config.factory.enable_template:
        _, vm = planned(config)
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


def _config(path: str | None) -> Config:
    return load_config(named_file(path), {}, dict(os.environ))
