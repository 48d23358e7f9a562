"""The `pyshim` command: which subcommands there are."""

import argparse
import importlib
import sys
from typing import Protocol

from pyshim.model.errors import ShimError


class Subcommand(Protocol):
    """What a module named in SUBCOMMANDS holds."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...
    def run(self, arguments: argparse.Namespace) -> int:
        """The exit code; a ShimError or OSError is shown as one line."""


SUBCOMMANDS = {
    "state": ("pyshim.operator.state", "show what is recorded about a sandbox on this node"),
    "cleanup": ("pyshim.operator.cleanup", "undo what dead shims left on this node"),
    "config": ("pyshim.operator.config", "check, show and explain the configuration"),
    "sizing": ("pyshim.operator.sizing", "explain how large a sandbox's VM is, or would be"),
    "direct-volume": ("pyshim.operator.direct_volume", "record, measure and resize volumes handed over as disks"),
    "cdi": ("pyshim.operator.cdi", "list, judge and resolve the devices of this node's CDI specs"),
    "initdata": ("pyshim.operator.initdata", "write, read and digest what a confidential guest's owner has measured"),
    "cgroups": ("pyshim.operator.cgroups", "show a sandbox's host cgroups: who is in them, limits, usage"),
    "debug": ("pyshim.operator.debug", "draw what the shim would decide"),
    "instances": ("pyshim.operator.instances", "choose a cloud instance out of a table"),
    "launcher": ("pyshim.operator.launcher", "write the shim binary that containerd calls"),
    "trace": ("pyshim.operator.trace", "show where the time went until the first output"),
    "zygote": ("pyshim.operator.zygote", "run the node's zygote, which makes shims by forking"),
    "version": ("pyshim.operator.version", "print versions"),
}


def run(words: list[str]) -> int:
    """The exit code of `pyshim <words>`: 2 for wrong usage, 1 for a failure told on stderr."""
    parser = argparse.ArgumentParser(
        prog="pyshim", description="containerd pods in virtual machines: operator's command"
    )
    choices = parser.add_subparsers(dest="subcommand", required=True, metavar="SUBCOMMAND")
    named = words[0] if words else ""
    for name, (module_name, summary) in SUBCOMMANDS.items():
        choice = choices.add_parser(name, help=summary, description=summary)
        if name == named:
            _module(module_name).add_arguments(choice)
    arguments = parser.parse_args(words)
    try:
        return _module(SUBCOMMANDS[arguments.subcommand][0]).run(arguments)
    except (ShimError, OSError) as error:
        print(f"pyshim: {error}", file=sys.stderr)
        return 1


def _module(name: str) -> Subcommand:
    module: Subcommand = importlib.import_module(name)
    return module
