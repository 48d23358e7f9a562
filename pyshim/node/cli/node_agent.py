"""`pyshim node-agent run|wait-removed`: what the pods of the Helm chart do."""

from typing import TYPE_CHECKING, Any

import click

from pyshim.node.cli.options import FORM, handlers_of
from pyshim.node.cli.output import examples
from pyshim.node.cli.service import run_with_api, with_api

if TYPE_CHECKING:
    from pyshim.node.kubernetes.api import Access


@click.group(epilog=examples("pyshim node-agent run --payload /opt/pyshim-image/payload --handler pykata"))
def command() -> None:
    """Install pyshim on the node of this pod, and label the node; for the DaemonSet of the Helm chart."""


@command.command()
@click.option("--node", envvar="NODE_NAME", required=True, metavar="NAME", help="Default: NODE_NAME.")
@click.option("--payload", required=True, metavar="DIR", help="What 'make payload' makes.")
@click.option("--handler", "handlers", multiple=True, required=True, metavar=FORM, help="The first one has to work.")
@click.option("--taint", default="", metavar="KEY", help="Taint to remove once the node is ready.")
@click.option("--remove-when", required=True, metavar="FILE", help="While it exists, take pyshim off the node.")
@click.option("--ready-file", required=True, metavar="FILE", help="Exists while the node is ready.")
@click.option("--containerd-config", default="", metavar="FILE", help="On the node; default: the container runtime's.")
@click.option(
    "--socket",
    default="",
    metavar="PATH",
    help="The container runtime's, on the node; .../crio.sock is CRI-O's. Default: that of the node.",
)
@click.option("--kind", default="", metavar="NAME", help="As of `pyshim install`; default: what the node has.")
@click.option("--sandboxer", default="", metavar="NAME", help="As of `pyshim install`.")
@click.option("--snapshotter", default="", metavar="NAME", help="As of `pyshim install`.")
@click.option("--python", default="/usr/bin/python3", show_default=True, metavar="PATH", help="On the node.")
@with_api
def run(access: "Access", **settings: Any) -> int:
    """Keep this node at the image's release, until SIGTERM.

    The pod is privileged and in the host's pid namespace: commands run in the mount namespace of process 1.
    """
    from pyshim.node.install.in_cluster.agent import NodeAgent, NodeAgentConfig, Pauses
    from pyshim.node.install.in_cluster.payload import NodeHost, require_payload

    config = NodeAgentConfig(**settings)
    handlers_of(config.handlers)
    require_payload(config.payload)
    return run_with_api(access, lambda api: NodeAgent(config, api=api, host=NodeHost(), pauses=Pauses()).run())


@command.command()
@click.option("--timeout", type=click.FloatRange(min=1), default=270.0, show_default=True, metavar="SECONDS")
@with_api
def wait_removed(timeout: float, access: "Access") -> int:
    """Wait until no node of the cluster has pyshim; name those that have."""
    from pyshim.node.install.in_cluster import agent

    return run_with_api(access, lambda api: agent.wait_removed(api, timeout_s=timeout))
