"""`pyshim nri`: runs the NRI plugin, or shows where it would put the VMs of pods, and why."""

import asyncio
import logging
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator, Mapping

import click
from msgspec.structs import replace

from pyshim import log
from pyshim.config.sources import Source, named_file, read_source
from pyshim.model.errors import InvalidArgument
from pyshim.model.host_facts import HostFacts, Machine, cpu_set, cpuset_text
from pyshim.model.sizing import PLACEMENT_SOCKET
from pyshim.model.units import MIB
from pyshim.node.cli.output import config_option, examples, json_option, print_json, print_table
from pyshim.node.cli.sandboxes import state_dir_option
from pyshim.node.kubernetes.manifest import PodManifest, pod_sizing, pods_in, read_documents
from pyshim.node.kubernetes.pod_vm import pod_config, pod_need
from pyshim.node.nri.assignments import Assignments, PlacementError, PlacementRequest, keep, place_or_share, shared_cpus
from pyshim.node.nri.description import read_description
from pyshim.node.nri.policies import DEFAULT, OURS, load
from pyshim.node.nri.policy import GuardedPolicy
from pyshim.resources.cgroups.plan.cgroups import rdt_class
from pyshim.resources.machine import read_machine
from pyshim.resources.probe import probe_host
from pyshim.state.store import StateStore

logger = logging.getLogger(__name__)

RUNTIME_SOCKET = "/var/run/nri/nri.sock"
MAX_PODS = 1000
"""Pods of one plan."""
_NAME, _INDEX, _SOCKET = "NRI_PLUGIN_NAME", "NRI_PLUGIN_IDX", "NRI_PLUGIN_SOCKET"
"""Set by a runtime that starts the plugin itself: its name, its index, and the descriptor of the connection."""


def reserved_cpus(_ctx: click.Context, _parameter: click.Parameter, text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted(cpu_set(text, "--reserved")))
    except InvalidArgument as error:
        raise click.BadParameter(f"{text!r} is not a list of CPUs") from error


policy_option = click.option(
    "--policy",
    "policy_name",
    default=DEFAULT,
    show_default=True,
    metavar="NAME",
    help=f"Who decides where VMs run: {', '.join(OURS)}, or one that is installed (docs/NRI.md).",
)


def check_reserved(machine: Machine, reserved: tuple[int, ...]) -> None:
    """Raises InvalidArgument when a reserved CPU is not there, or offline."""
    online = {cpu.id for cpu in machine.cpus if cpu.online}
    if missing := set(reserved) - online:
        raise InvalidArgument(f"reserve CPUs {cpuset_text(reserved)}: not online: {cpuset_text(missing)}")


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
    from pyshim.node.nri.plugin import NriPlugin, serve
    from pyshim.node.nri.pods import Pods

    log.set_up(debug=False)
    machine = read_machine()
    check_reserved(machine, reserved)
    place: Callable[[Assignments, PlacementRequest], Assignments] = place_or_share
    if policy_name != DEFAULT:
        place = GuardedPolicy(load(policy_name), on_refusal=_log_refusal).place
    pods = Pods(Assignments(machine=machine, reserved=reserved), frozenset(handlers), rdt_classes, place)
    given = _given_socket(os.environ.get(_SOCKET, ""))
    plugin = NriPlugin(pods, name=name, index=index, read_machine=read_machine)
    asyncio.run(serve(pods, plugin, given or path, placement_socket=placement_socket))
    return 0


def _log_refusal(need: PlacementRequest, reason: str) -> None:
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


@command.command("plan")
@click.argument("manifests", metavar="POD.yaml...", nargs=-1, required=True)
@click.option("--machine", "machine_path", metavar="FILE", help="A description of a machine; default: this one.")
@click.option("--reserved", default="", callback=reserved_cpus, metavar="CPUS", help="Never exclusive, such as 0-1.")
@config_option
@policy_option
@click.option("--empty", is_flag=True, help="As if no sandbox ran on this machine.")
@state_dir_option
@json_option
def plan(
    manifests: tuple[str, ...],
    machine_path: str | None,
    reserved: tuple[int, ...],
    config_path: str | None,
    policy_name: str,
    empty: bool,
    state_dir: str,
    as_json: bool,
) -> int:
    """Show the CPUs and nodes of pods' VMs, placed in the order of the files, beside those that run.

    POD.yaml holds pods, or anything with a pod template, which counts as often as it has replicas.
    """
    policy = GuardedPolicy(load(policy_name), on_refusal=_print_refusal)
    machine = read_machine() if machine_path is None else read_description(machine_path)
    check_reserved(machine, reserved)
    host = replace(
        probe_host(),
        cpu_count=sum(cpu.online for cpu in machine.cpus),
        memory_mib=sum(node.memory_bytes for node in machine.nodes) // MIB,
    )
    source = read_source(named_file(config_path), dict(os.environ))
    assignments = Assignments(machine=machine, reserved=reserved)
    refused: dict[str, str] = {}
    if machine_path is None and not empty:
        assignments = _with_running(assignments, state_dir)
    running = list(assignments.needs.values())
    needs = list(_needs(manifests, source, host))
    for need in needs:
        try:
            assignments = policy.place(assignments, need)
        except PlacementError as error:
            refused[need.sandbox_id] = str(error)
    if as_json:
        document = _document(assignments, needs, refused)
        print_json({**document, "running": _document(assignments, running, {})["pods"]})
    else:
        _print(assignments, running, needs, refused)
    return 1 if refused else 0


def _print_refusal(need: PlacementRequest, reason: str) -> None:
    print(f"pyshim: place {need.name}: the policy's answer is refused: {reason}", file=sys.stderr)


def _with_running(assignments: Assignments, state_dir: str) -> Assignments:
    """`assignments` with the running VMs. One whose CPUs are not free is left out, with a line on stderr."""
    from pyshim.node.nri.shims import placed_sandboxes

    store = StateStore(root=state_dir)
    for _shim, placed in placed_sandboxes(store, sorted(store.sandbox_ids())):
        try:
            assignments = keep(assignments, placed.request, placed.placement)
        except PlacementError as error:
            print(f"pyshim: {error}", file=sys.stderr)
    return assignments


def _needs(paths: tuple[str, ...], source: Source, host: HostFacts) -> Iterator[PlacementRequest]:
    """One for each VM on the node. Raises InvalidArgument for more than MAX_PODS pods, and names that come twice."""
    seen: set[str] = set()
    for path in paths:
        for pod in pods_in(read_documents(path), path):
            need = _need(pod, path, source, host)
            if need is None:
                continue
            if len(seen) + pod.copies > MAX_PODS:
                raise InvalidArgument(f"plan '{path}': more than {MAX_PODS} pods")
            for number in range(1, pod.copies + 1):
                name = need.name if pod.copies == 1 else f"{need.name}-{number}"
                if name in seen:
                    raise InvalidArgument(f"plan '{path}': pod '{name}' is there twice")
                seen.add(name)
                yield replace(need, sandbox_id=name, name=name)


def _need(pod: PodManifest, path: str, source: Source, host: HostFacts) -> PlacementRequest | None:
    """The shim's request; None for a pod with a remote VM."""
    config = pod_config(source, pod.annotations)
    if config.is_remote:
        return None
    return pod_need(pod.title.partition(" ")[2], pod_sizing(pod, path, None), config, host)


def _print(
    assignments: Assignments, running: list[PlacementRequest], needs: list[PlacementRequest], refused: dict[str, str]
) -> None:
    rows = []
    for need in (*running, *needs):
        size = (need.name, str(need.vcpus), str(need.memory_bytes // MIB))
        placement = assignments.placements.get(need.sandbox_id)
        if placement is None:
            rows.append((*size, "-", "-", "-", refused[need.sandbox_id]))
        else:
            cpus = cpuset_text(placement.vcpu_cpus)
            cells = (cpus, "own" if placement.exclusive else "shared", cpuset_text(placement.memory_nodes) or "any")
            rows.append((*size, *cells, f"runs: {placement.why}" if need in running else placement.why))
    headings = ("POD", "VCPUS", "MIB", "CPUS", "", "MEMORY NODES", "WHY")
    print_table(headings, rows, right=("VCPUS", "MIB"), wrap="WHY")
    print(f"\nshared CPUs: {cpuset_text(shared_cpus(assignments))}")


def _document(assignments: Assignments, needs: list[PlacementRequest], refused: dict[str, str]) -> dict[str, object]:
    pods = []
    for need in needs:
        found: dict[str, object] = {"name": need.name, "vcpus": need.vcpus, "memoryMiB": need.memory_bytes // MIB}
        placement = assignments.placements.get(need.sandbox_id)
        if placement is None:
            found["refused"] = refused[need.sandbox_id]
        else:
            found |= {
                "exclusive": placement.exclusive,
                "vcpuCpus": cpuset_text(placement.vcpu_cpus),
                "serviceCpus": cpuset_text(placement.service_cpus),
                "cpuNodes": cpuset_text(placement.cpu_nodes),
                "memoryNodes": cpuset_text(placement.memory_nodes),
                "why": placement.why,
            }
        pods.append(found)
    return {"sharedCpus": cpuset_text(shared_cpus(assignments)), "pods": pods}
