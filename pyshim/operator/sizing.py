"""`pyshim sizing show|explain`: why a sandbox has the size it has, and what a pod's would be."""

import argparse
import json
import os
import sys
from dataclasses import replace

from pyshim.config.load import build_config
from pyshim.config.sources import read_source
from pyshim.host.probe import probe_host
from pyshim.model.errors import FailedPrecondition
from pyshim.model.host_facts import HostFacts
from pyshim.model.task import RuntimeOptions
from pyshim.operator.sizing_manifest import overhead_of, pod_resources, pods_in, read_documents
from pyshim.operator.sizing_text import explanation_json, explanation_lines, record_lines
from pyshim.operator.state import STATE_DIR, read_record
from pyshim.plan.remote_vm import elsewhere
from pyshim.plan.sizing.agreement import explain_pod
from pyshim.plan.sizing.capacity import HOST_SIDE_MIB
from pyshim.plan.sizing.record import SizingRecord


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    show = actions.add_parser("show", help="how a running sandbox came to its size")
    show.add_argument("id", metavar="SANDBOX", help="sandbox id")
    show.add_argument("--state-dir", default=STATE_DIR, metavar="DIR", help="default: %(default)s")
    explain = actions.add_parser("explain", help="what Kubernetes reserves for a pod, and what its VM would be")
    explain.add_argument("manifest", metavar="POD.yaml", help="a pod, or anything with a pod template")
    explain.add_argument("--config", metavar="FILE", help="default: the one a sandbox would read")
    explain.add_argument("--runtimeclass", metavar="FILE", help="manifest with the RuntimeClass, for its overhead")
    explain.add_argument("--node-cpus", type=_positive, metavar="N", help="default: this machine's")
    explain.add_argument("--node-memory", type=_positive, metavar="MIB", help="default: this machine's")
    explain.add_argument(
        "--host-side",
        type=_not_negative,
        default=HOST_SIDE_MIB,
        metavar="MIB",
        help="memory of VMM, file server and shim beside guest RAM; default: %(default)s, measured with emulation",
    )
    for action in (show, explain):
        action.add_argument("--json", action="store_true", help="for programs")


def run(arguments: argparse.Namespace) -> int:
    lines = _show(arguments) if arguments.action == "show" else _explain(arguments)
    print("\n".join(lines))
    return 0


def _show(arguments: argparse.Namespace) -> list[str]:
    document = read_record(arguments.state_dir, arguments.id)
    where = f"sizing record of '{arguments.id}'"
    snapshot = (document.get("Pyshim") or {}).get("Snapshot") or {}
    if not snapshot.get("Sizing"):
        raise FailedPrecondition(f"show {where}: none is kept; the sandbox is not planned yet, or not ours")
    record = SizingRecord.from_json(snapshot["Sizing"], where)
    return [json.dumps(record.as_json(), indent=2)] if arguments.json else list(record_lines(record))


def _explain(arguments: argparse.Namespace) -> list[str]:
    options = (
        RuntimeOptions(config_path=os.path.abspath(arguments.config), config_body=b"") if arguments.config else None
    )
    config = build_config(read_source(options, dict(os.environ)))
    host = elsewhere(_node(arguments)) if config.is_remote else _node(arguments)
    path = arguments.manifest
    documents = read_documents(path)
    class_path = arguments.runtimeclass or path
    class_documents = read_documents(class_path) if arguments.runtimeclass else documents
    lines: list[str] = []
    found = []
    for manifest in pods_in(documents, path):
        overhead = overhead_of(class_documents, manifest.runtime_class, class_path)
        if arguments.runtimeclass and overhead is None:
            wanted = manifest.runtime_class or "the pod names none, and the file does not hold exactly one"
            raise FailedPrecondition(f"find RuntimeClass in '{class_path}' for {manifest.title}: {wanted}")
        explained = explain_pod(
            pod_resources(manifest, path, overhead), config, host, host_side_mib=arguments.host_side
        )
        found.append(explanation_json(manifest.title, explained))
        lines += ["", *explanation_lines(manifest.title, explained, full_block=_block())]
    return [json.dumps(found[0] if len(found) == 1 else found, indent=2)] if arguments.json else lines[1:]


def _node(arguments: argparse.Namespace) -> HostFacts:
    facts = probe_host()
    return replace(
        facts,
        cpu_count=arguments.node_cpus or facts.cpu_count,
        memory_mib=arguments.node_memory or facts.memory_mib,
    )


def _block() -> str:
    """What the terminal can show."""
    try:
        "█".encode(sys.stdout.encoding or "ascii")
    except (UnicodeError, LookupError):
        return "#"
    return "█"


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"not above 0: {text!r}")
    return value


def _not_negative(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"negative: {text!r}")
    return value
