"""`pyshim sizing show|explain|podfixed`: explains the size of a sandbox, of a pod's VM, and of a RuntimeClass's
overhead."""

import math
import os
import sys
from fractions import Fraction

import click
from msgspec.structs import replace

from pyshim.config.sources import named_file, read_source
from pyshim.model.config import Config
from pyshim.model.errors import FailedPrecondition, NotFound
from pyshim.model.host_facts import unbounded
from pyshim.model.sizing import SizingRecord
from pyshim.node.cli.options import node_quotas_option, pairs
from pyshim.node.cli.output import config_option, examples, json_option, print_json
from pyshim.node.cli.sandboxes import RUNS, sandbox_argument, sandbox_id, sandboxes, snapshot_of, state_dir_option
from pyshim.node.cli.sizing_text import (
    HostSide,
    explanation_json,
    explanation_lines,
    pod_fixed_json,
    pod_fixed_lines,
    record_lines,
    runtime_class_lines,
)
from pyshim.node.cli.usage import host_side_mib_of
from pyshim.node.kubernetes.agreement import explain_pod
from pyshim.node.kubernetes.manifest import overhead_of, pod_sizing, pods_in, read_documents, runtime_class
from pyshim.node.kubernetes.overhead import OverheadPart, class_parts, total
from pyshim.node.kubernetes.pod_vm import pod_config, policy_in_force
from pyshim.resources.probe import probe_host
from pyshim.resources.sizing.plan.capacity import host_side_mib


@click.group(
    epilog=examples(
        "pyshim sizing show 1a2b",
        "pyshim sizing explain pod.yaml --node-cpus 8",
        "pyshim sizing podfixed --runtimeclass pykata | kubectl apply -f -",
    )
)
def command() -> None:
    """Explain how large a sandbox's VM is, or would be, and what a pod costs beside its containers."""


@command.command()
@sandbox_argument
@state_dir_option
@json_option
def show(sandbox: str, state_dir: str, as_json: bool) -> int:
    """Explain the size of a running sandbox."""
    found = sandbox_id(sandbox, state_dir)
    where = f"sizing record of '{found}'"
    sizing = snapshot_of(found, state_dir).sizing
    if not sizing:
        raise FailedPrecondition(f"show {where}: none is recorded yet")
    record = SizingRecord.from_json(sizing, where)
    if as_json:
        print_json(record.as_json())
    else:
        print("\n".join(record_lines(record)))
    return 0


@command.command()
@click.argument("manifest", metavar="POD.yaml")
@config_option
@click.option("--runtimeclass", "class_path", metavar="FILE", help="Manifest with the RuntimeClass, for its overhead.")
@click.option("--node-cpus", type=click.IntRange(min=1), metavar="N", help="Default: this machine's.")
@click.option("--node-kvm", type=click.Choice(["yes", "no"]), help="Hardware virtualization; default: this machine's.")
@click.option("--node-memory", type=click.IntRange(min=1), metavar="MIB", help="Default: this machine's.")
@node_quotas_option
@click.option(
    "--host-side",
    type=click.IntRange(min=0),
    metavar="MIB",
    help="Memory of VMM, file server and shim beside guest RAM; default: as measured, by the node's accelerator.",
)
@json_option
def explain(
    manifest: str,
    config_path: str | None,
    class_path: str | None,
    node_cpus: int | None,
    node_kvm: str | None,
    node_memory: int | None,
    node_cpu_quotas: str,
    host_side: int | None,
    as_json: bool,
) -> int:
    """Compare what Kubernetes reserves for a pod with the size of its VM.

    POD.yaml holds a pod, or anything with a pod template.
    """
    source = read_source(named_file(config_path), dict(os.environ))
    facts = probe_host()
    node = replace(
        facts,
        cpu_count=node_cpus or facts.cpu_count,
        memory_mib=node_memory or facts.memory_mib,
        kvm_usable=facts.kvm_usable if node_kvm is None else node_kvm == "yes",
    )
    documents = read_documents(manifest)
    class_documents = read_documents(class_path) if class_path else documents
    lines: list[str] = []
    found = []
    for pod in pods_in(documents, manifest):
        overhead = overhead_of(class_documents, pod.runtime_class, class_path or manifest)
        if class_path and overhead is None:
            wanted = pod.runtime_class or "the pod names none, and the file does not hold exactly one"
            raise FailedPrecondition(f"find RuntimeClass in '{class_path}' for {pod.title}: {wanted}")
        config = pod_config(source, pod.annotations)
        host = unbounded(node) if config.is_remote else node
        beside_mib = host_side_mib(config, host) if host_side is None else host_side
        sizing = replace(pod_sizing(pod, manifest, overhead), has_quotas=node_cpu_quotas == "yes")
        explained = explain_pod(sizing, config, host, host_side_mib=beside_mib)
        found.append(explanation_json(pod.title, explained))
        lines += ["", *explanation_lines(pod.title, explained, full_block=_block())]
    if as_json:
        print_json(found[0] if len(found) == 1 else found)
    else:
        print("\n".join(lines[1:]))
    return 0


@command.command()
@config_option
@click.option("--node-kvm", type=click.Choice(["yes", "no"]), help="Hardware virtualization; default: this machine's.")
@click.option(
    "--host-side",
    type=click.IntRange(min=0),
    metavar="MIB",
    help="Memory of VMM, file server and shim beside guest RAM; default: the most of a sandbox that runs here, else"
    " as documented, by the accelerator.",
)
@click.option("--reserve", type=click.IntRange(min=0), default=0, metavar="MIB", help="Memory on top of the sum.")
@click.option("--runtimeclass", "class_name", metavar="NAME", help="Print the manifest of a RuntimeClass of this name.")
@click.option("--handler", metavar="NAME", help="Of the RuntimeClass; default: its name.")
@click.option(
    "--node-selector", multiple=True, callback=pairs, metavar="KEY=VALUE", help="Of the RuntimeClass; may be repeated."
)
@state_dir_option
@json_option
def podfixed(
    config_path: str | None,
    node_kvm: str | None,
    host_side: int | None,
    reserve: int,
    class_name: str | None,
    handler: str | None,
    node_selector: dict[str, str],
    state_dir: str,
    as_json: bool,
) -> int:
    """Compute the overhead.podFixed of a RuntimeClass, and the figures that it is the sum of.

    It covers the VM of every pod that states its limits; 'sizing explain' has the figures of one pod.
    """
    if class_name is None and (handler or node_selector):
        raise click.UsageError("--handler and --node-selector belong to --runtimeclass")
    source = read_source(named_file(config_path), dict(os.environ))
    config = pod_config(source, {})
    facts = probe_host()
    facts = replace(facts, kvm_usable=facts.kvm_usable if node_kvm is None else node_kvm == "yes")
    if host_side is not None:
        beside = HostSide(mib=host_side, source="--host-side")
    else:
        beside = _measured(config, state_dir) or HostSide(
            mib=host_side_mib(config, facts), source="documented in docs/KUBERNETES.md"
        )
    policy = policy_in_force(config)
    parts = class_parts(config, policy, beside.mib)
    if reserve:
        parts = (*parts, OverheadPart(name="reserve", memory_mib=Fraction(reserve)))
    if class_name is not None:
        manifest = runtime_class(class_name, handler or class_name, total(parts), node_selector)
        if as_json:
            print_json(manifest)
        else:
            print("\n".join(runtime_class_lines(manifest, parts, beside)))
    elif as_json:
        print_json(pod_fixed_json(parts, policy, beside))
    else:
        print("\n".join(pod_fixed_lines(parts, policy, beside)))
    return 0


def _measured(config: Config, state_dir: str) -> HostSide | None:
    """The most memory that a running sandbox of this node takes beside guest RAM: of remote VMs if `config` is remote,
    else of local ones."""
    found = []
    for sandbox in sandboxes(state_dir):
        if sandbox.health != RUNS or (len(sandbox.processes) == 1) != config.is_remote:
            continue
        try:
            found.append(host_side_mib_of(sandbox))
        except NotFound:
            continue  # it ended meanwhile
    if not found:
        return None
    number = f"{len(found)} sandboxes" if len(found) > 1 else "the one sandbox"
    return HostSide(mib=math.ceil(max(found)), source=f"measured: {'the most of ' * (len(found) > 1)}{number} here")


def _block() -> str:
    """The character of bars: one that the terminal can show."""
    try:
        "█".encode(sys.stdout.encoding or "ascii")
    except (UnicodeError, LookupError):
        return "#"
    return "█"
