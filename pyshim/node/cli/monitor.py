"""`pyshim monitor`: the node's endpoint for Prometheus, as kata-monitor."""

import asyncio

import click

from pyshim import log
from pyshim.model.errors import InvalidArgument
from pyshim.model.observation import METRICS_DIRECTORY
from pyshim.node.cli.output import examples
from pyshim.state.store import ROOT as STATE_DIR

RUST_STATE_DIR = "/run/kata"
"""The directory of the Rust runtime's sandboxes."""


@click.command(epilog=examples("pyshim monitor", "pyshim monitor --listen-address 0.0.0.0:8090"))
@click.option(
    "--listen-address", default="127.0.0.1:8090", show_default=True, metavar="HOST:PORT", help="Where to answer."
)
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
    help="Where sandboxes without one have their directories, such as those of Kata's shims; may be repeated.",
)
def command(listen_address: str, metrics_dir: str, state_dirs: tuple[str, ...]) -> int:
    """Serve the metrics of all sandboxes of this node for Prometheus."""
    host, port = _address(listen_address)
    from pyshim.node.monitor.server import NodeMonitor, serve  # aiohttp, for this verb only

    log.set_up(debug=False)
    asyncio.run(serve(NodeMonitor(host=host, port=port, metrics_directory=metrics_dir, roots=state_dirs)))
    return 0


def _address(text: str) -> tuple[str, int]:
    host, separator, port = text.rpartition(":")
    if not separator or not port.isdecimal() or not 0 <= int(port) <= 65535:
        raise InvalidArgument(f"read address {text!r}: expected HOST:PORT")
    return host.strip("[]") or "0.0.0.0", int(port)
