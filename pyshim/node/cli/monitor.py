"""`pyshim monitor`: the node's endpoint for Prometheus, as kata-monitor."""

import click

from pyshim.model.places import METRICS_DIRECTORY
from pyshim.model.places import STATE_ROOT as STATE_DIR
from pyshim.node.cli.output import examples
from pyshim.node.cli.service import address_option, run_service

RUST_STATE_DIR = "/run/kata"
"""The directory of the Rust runtime's sandboxes."""


@click.command(epilog=examples("pyshim monitor", "pyshim monitor --listen-address 0.0.0.0:8090"))
@address_option("--listen-address", "127.0.0.1:8090")
@click.option(
    "--metrics-dir",
    default=METRICS_DIRECTORY,
    show_default=True,
    metavar="DIR",
    help="Where shims have sockets that only answer questions.",
)
@click.option(
    "--state-dir",
    "state_dirs",
    multiple=True,
    default=(STATE_DIR, RUST_STATE_DIR),
    show_default=True,
    metavar="DIR",
    help="State directory of sandboxes without such a socket, such as Kata's; may be repeated.",
)
def command(address: tuple[str, int], metrics_dir: str, state_dirs: tuple[str, ...]) -> int:
    """Serve the metrics of all sandboxes of this node for Prometheus."""
    from pyshim.node.monitor.server import NodeMonitor, serve  # aiohttp, for this verb only

    host, port = address
    return run_service(serve(NodeMonitor(host=host, port=port, metrics_directory=metrics_dir, roots=state_dirs)))
