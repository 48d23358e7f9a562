"""`pyshim sizing show|explain`: why a sandbox has the size it has, and what a pod's would be."""

import os
import sys

import click
from msgspec.structs import replace

from pyshim.cli.output import examples, json_option, print_json
from pyshim.cli.sandbox import sandbox_argument, sandbox_id, state_dir_option
from pyshim.cli.sizing_text import explanation_json, explanation_lines, record_lines
from pyshim.cli.state import read_snapshot
from pyshim.config.sources import named_file, read_source
from pyshim.kubernetes.agreement import explain_pod
from pyshim.kubernetes.manifest import overhead_of, pod_sizing, pods_in, read_documents
from pyshim.kubernetes.pod_config import pod_config
from pyshim.model.errors import FailedPrecondition
from pyshim.model.host_facts import elsewhere
from pyshim.resources.probe import probe_host
from pyshim.resources.sizing.plan.capacity import host_side_mib
from pyshim.resources.sizing.plan.record import SizingRecord


@click.group(epilog=examples("pyshim sizing show 1a2b", "pyshim sizing explain pod.yaml --node-cpus 8"))
def command() -> None:
    """Explain how large a sandbox's VM is, or would be."""


@command.command()
@sandbox_argument
@state_dir_option
@json_option
def show(sandbox: str, state_dir: str, as_json: bool) -> int:
    """How a running sandbox came to its size."""
    found = sandbox_id(sandbox, state_dir)
    where = f"sizing record of '{found}'"
    snapshot = read_snapshot(state_dir, found)
    if not snapshot.get("Sizing"):
        raise FailedPrecondition(f"show {where}: none is kept; the sandbox is not planned yet, or not ours")
    record = SizingRecord.from_json(snapshot["Sizing"], where)
    if as_json:
        print_json(record.as_json())
    else:
        print("\n".join(record_lines(record)))
    return 0


@command.command()
@click.argument("manifest", metavar="POD.yaml")
@click.option("--config", "config_path", metavar="FILE", help="Default: the one a sandbox would read.")
@click.option("--runtimeclass", "class_path", metavar="FILE", help="Manifest with the RuntimeClass, for its overhead.")
@click.option("--node-cpus", type=click.IntRange(min=1), metavar="N", help="Default: this machine's.")
@click.option("--node-kvm", type=click.Choice(["yes", "no"]), help="Hardware virtualization; default: this machine's.")
@click.option("--node-memory", type=click.IntRange(min=1), metavar="MIB", help="Default: this machine's.")
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
    host_side: int | None,
    as_json: bool,
) -> int:
    """What Kubernetes reserves for a pod, and what its VM would be.

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
        host = elsewhere(node) if config.is_remote else node
        beside_mib = host_side_mib(config, host) if host_side is None else host_side
        explained = explain_pod(pod_sizing(pod, manifest, overhead), config, host, host_side_mib=beside_mib)
        found.append(explanation_json(pod.title, explained))
        lines += ["", *explanation_lines(pod.title, explained, full_block=_block())]
    if as_json:
        print_json(found[0] if len(found) == 1 else found)
    else:
        print("\n".join(lines[1:]))
    return 0


def _block() -> str:
    """What the terminal can show."""
    try:
        "█".encode(sys.stdout.encoding or "ascii")
    except (UnicodeError, LookupError):
        return "#"
    return "█"
