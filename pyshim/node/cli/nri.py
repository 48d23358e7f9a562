"""`pyshim nri`: runs the NRI plugin, or shows where it would put the VMs of pods (`nri_plan.py`)."""

import asyncio
import logging
import os
import re
import socket
from collections.abc import Callable, Mapping

import click

from pyshim import log
from pyshim.model.errors import InvalidArgument
from pyshim.model.placement import SOCKET as PLACEMENT_SOCKET
from pyshim.node.cli.nri_plan import check_reserved, plan, policy_option, reserved_cpus
from pyshim.node.cli.output import examples
from pyshim.node.nri.assignments import Assignments, Need, place_or_share
from pyshim.node.nri.policies import DEFAULT, load
from pyshim.node.nri.policy import GuardedPolicy
from pyshim.resources.cgroups.plan.cgroups import rdt_class
from pyshim.resources.machine import read_machine

logger = logging.getLogger(__name__)

RUNTIME_SOCKET = "/var/run/nri/nri.sock"
_NAME, _INDEX, _SOCKET = "NRI_PLUGIN_NAME", "NRI_PLUGIN_IDX", "NRI_PLUGIN_SOCKET"
"""Set by a runtime that starts the plugin itself: its name, its index, and the descriptor of the connection."""


def _rdt_classes(_ctx: click.Context, _parameter: click.Parameter, texts: tuple[str, ...]) -> dict[str, str]:
    from pyshim.node.nri.pods import EXCLUSIVE, SHARED

    found: dict[str, str] = {}
    for text in texts:
        kind, _, name = text.partition("=")
        try:
            checked, _ = rdt_class({"intelRdt": {"closID": name}})
        except InvalidArgument as error:
            raise click.BadParameter(f"{text!r}: {str(error).partition(': ')[2]}") from error
        if kind not in (EXCLUSIVE, SHARED) or not checked:
            raise click.BadParameter(f"{text!r} is neither exclusive=NAME nor shared=NAME")
        found[kind] = checked
    return found


@click.group(
    epilog=examples(
        "pyshim nri plan pod.yaml deployment.yaml",
        "pyshim nri plan pods.yaml --machine two-sockets.yaml --reserved 0-1",
    )
)
def command() -> None:
    """Put VMs on the CPUs and NUMA nodes of a node (NRI plugin)."""


command.add_command(plan)


@command.command()
@click.option(
    "--handler",
    "handlers",
    multiple=True,
    default=("pykata",),
    show_default=True,
    metavar="NAME",
    help="A runtime handler whose pods are VMs; may be repeated.",
)
@click.option("--socket", "path", default=RUNTIME_SOCKET, show_default=True, metavar="SOCKET", help="The runtime's.")
@click.option(
    "--placement-socket",
    default=PLACEMENT_SOCKET,
    show_default=True,
    metavar="SOCKET",
    help="Where shims ask before they boot a VM (placement_socket of their configuration); empty: nowhere.",
)
@click.option("--name", default="pyshim", envvar=_NAME, show_default=True, help="The plugin's name for the runtime.")
@click.option("--index", default="20", envvar=_INDEX, show_default=True, help="Its turn among plugins: two digits.")
@click.option(
    "--reserved",
    default="",
    callback=reserved_cpus,
    metavar="CPUS",
    help="Never exclusive, such as 0-1; as the kubelet's reservedSystemCPUs.",
)
@click.option(
    "--rdt-class",
    "rdt_classes",
    multiple=True,
    callback=_rdt_classes,
    metavar="exclusive=NAME|shared=NAME",
    help="The node's class of cache and memory bandwidth for VMs with CPUs of their own, or for the others.",
)
@policy_option
def run(
    handlers: tuple[str, ...],
    path: str,
    placement_socket: str,
    name: str,
    index: str,
    reserved: tuple[int, ...],
    rdt_classes: Mapping[str, str],
    policy_name: str,
) -> int:
    """Serve the runtime, and every later one at its socket, until SIGTERM.

    A runtime that starts the plugin itself (from its plugin directory) is served over the descriptor it gave.
    """
    from pyshim.node.nri.plugin import NriPlugin
    from pyshim.node.nri.pods import Pods
    from pyshim.node.nri.serve import serve

    log.set_up(debug=False)
    machine = read_machine()
    check_reserved(machine, reserved)
    place: Callable[[Assignments, Need], Assignments] = place_or_share
    if policy_name != DEFAULT:
        place = GuardedPolicy(load(policy_name), on_refusal=_log_refusal).place
    pods = Pods(Assignments(machine=machine, reserved=reserved), frozenset(handlers), rdt_classes, place)
    given = _given_socket(os.environ.get(_SOCKET, ""))
    plugin = NriPlugin(pods, name=name, index=index, read_machine=read_machine)
    asyncio.run(serve(pods, plugin, given or path, placement_socket=placement_socket))
    return 0


def _log_refusal(need: Need, reason: str) -> None:
    logger.warning(
        "policy refused, the default answers", extra={"sandbox": need.sandbox_id, "pod": need.name, "error": reason}
    )


def _given_socket(text: str) -> socket.socket | None:
    if not text:
        return None
    try:
        if not re.fullmatch("[0-9]{1,9}", text):
            raise ValueError("not a descriptor")
        found = socket.socket(fileno=int(text))
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"use {_SOCKET}={text[:100]!r}: {error}") from error
    found.set_inheritable(False)
    return found
