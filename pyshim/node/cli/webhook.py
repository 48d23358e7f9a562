"""`pyshim webhook serve`: the admission webhook."""

from collections.abc import Mapping

import click
from msgspec.structs import replace

from pyshim.config.sources import named_file, read_source
from pyshim.model.errors import InvalidArgument
from pyshim.model.host_facts import HostFacts, unbounded
from pyshim.node.cli.options import node_quotas_option, pairs
from pyshim.node.cli.output import examples
from pyshim.node.cli.service import address_option, run_service
from pyshim.node.kubernetes.agreement import Disagreement
from pyshim.node.webhook.judge import PodClass
from pyshim.resources.probe import probe_host

_class_option = click.option(
    "--class",
    "classes",
    multiple=True,
    required=True,
    callback=pairs,
    metavar="NAME=FILE",
    help="A runtime class and the configuration its nodes have; may be repeated.",
)


@click.group(
    epilog=examples(
        "pyshim webhook serve --class pykata=/etc/pyshim/configuration.toml --certificate tls.crt --key tls.key",
    )
)
def command() -> None:
    """Make pods' VMs as large as their requests and warn about what does not fit, as Kubernetes creates the pods."""


@command.command()
@_class_option
@click.option(
    "--drop-in",
    "drop_ins",
    multiple=True,
    callback=pairs,
    metavar="NAME=FILE",
    help="Settings on top of those of a class's FILE; may be repeated.",
)
@click.option("--certificate", required=True, metavar="FILE", help="PEM, with the chain; read again when it changes.")
@click.option("--key", required=True, metavar="FILE", help="PEM, without a password.")
@address_option("--listen", "0.0.0.0:8443")
@click.option(
    "--deny",
    "denied",
    multiple=True,
    type=click.Choice([each.value for each in Disagreement]),
    metavar="SUBJECT",
    help="Deny pods with this warning, such as 'requests below limits'; may be repeated.",
)
@click.option("--node-cpus", type=click.IntRange(min=1), metavar="N", help="Of the largest node; default: not checked.")
@click.option("--node-memory", type=click.IntRange(min=1), metavar="MIB", help="The same; default: not checked.")
@node_quotas_option
@click.option(
    "--node-kvm",
    type=click.Choice(["yes", "no"]),
    default="yes",
    show_default=True,
    help="The nodes have hardware virtualization.",
)
@click.option(
    "--host-side",
    type=click.IntRange(min=0),
    metavar="MIB",
    help="Memory of VMM, file server and shim beside guest RAM; default: as measured, by --node-kvm.",
)
def serve(
    classes: dict[str, str],
    drop_ins: dict[str, str],
    certificate: str,
    key: str,
    address: tuple[str, int],
    denied: tuple[str, ...],
    node_cpus: int | None,
    node_memory: int | None,
    node_cpu_quotas: str,
    node_kvm: str,
    host_side: int | None,
) -> int:
    """Serve /mutate, /validate, /healthz and /metrics over HTTPS, until SIGTERM.

    The configurations are read once; restart the server when they change.
    """
    from pyshim.node.webhook.certificate import Certificate
    from pyshim.node.webhook.server import serve as serve_webhook

    unknown = unbounded(probe_host())
    node = replace(
        unknown,
        cpu_count=node_cpus or unknown.cpu_count,
        memory_mib=node_memory or unknown.memory_mib,
        kvm_usable=node_kvm == "yes",
    )
    quotas = node_cpu_quotas == "yes"
    found = pod_classes(classes, drop_ins, node, host_side, frozenset(map(Disagreement, denied)), has_quotas=quotas)
    host, port = address
    return run_service(serve_webhook(found, Certificate(certificate, key), host=host, port=port))


def pod_classes(
    paths: Mapping[str, str],
    drop_ins: Mapping[str, str],
    node: HostFacts,
    host_side_mib: int | None,
    denied: frozenset[Disagreement],
    *,
    has_quotas: bool = True,
) -> dict[str, PodClass]:
    """Raises ShimError for a configuration with which no pod would start, and for a drop-in without its class."""
    if foreign := sorted(drop_ins.keys() - paths.keys()):
        raise InvalidArgument(f"read drop-in '{drop_ins[foreign[0]]}': there is no class '{foreign[0]}'")
    found = {}
    for name, path in paths.items():
        on_top = (drop_ins[name],) if name in drop_ins else ()
        source = read_source(named_file(path), {}, on_top=on_top)
        found[name] = PodClass(
            source=source, node=node, host_side_mib=host_side_mib, has_quotas=has_quotas, denied=denied
        )
        found[name].config({})
    return found
