"""The monitor sockets of sandboxes: a request to one, one sandbox's metrics, and the node's endpoint for Prometheus."""

import asyncio

import click

from pyshim.model.observation import MONITOR_SOCKET
from pyshim.model.places import METRICS_DIRECTORY
from pyshim.model.places import STATE_ROOT as STATE_DIR
from pyshim.node.cli.output import examples
from pyshim.node.cli.sandboxes import sandbox_argument, sandbox_id, state_dir_option
from pyshim.node.cli.service import address_option, run_service
from pyshim.node.monitor.shims import shim_answer

RUST_STATE_DIR = "/run/kata"
"""The directory of the Rust runtime's sandboxes."""
_TIMEOUT_S = 30.0


def monitor_socket(state_dir: str, sandbox_id: str) -> str:
    return f"{state_dir}/{sandbox_id}/{MONITOR_SOCKET}"


def ask_sandbox(state_dir: str, sandbox: str, method: str, target: str, body: bytes = b"") -> str:
    """The answer of the shim of the sandbox that `sandbox` names. Raises NotFound for none, and as `shim_answer`."""
    return exchange(monitor_socket(state_dir, sandbox_id(sandbox, state_dir)), method, target, body)


def exchange(address: str, method: str, target: str, body: bytes = b"") -> str:
    """The answer of the shim at the socket `address`. Raises as `shim_answer`."""
    return asyncio.run(shim_answer(address, target, method=method, body=body, within_s=_TIMEOUT_S))


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
def monitor_command(address: tuple[str, int], metrics_dir: str, state_dirs: tuple[str, ...]) -> int:
    """Serve the metrics of all sandboxes of this node for Prometheus."""
    from pyshim.node.monitor.server import NodeMonitor, serve  # aiohttp, for this verb only

    host, port = address
    return run_service(serve(NodeMonitor(host=host, port=port, metrics_directory=metrics_dir, roots=state_dirs)))


@click.command(epilog=examples("pyshim metrics 1a2b | grep pyshim_vm"))
@sandbox_argument
@state_dir_option
def metrics_command(sandbox: str, state_dir: str) -> int:
    """Print the metrics of a sandbox, in Prometheus' text format."""
    print(ask_sandbox(state_dir, sandbox, "GET", "/metrics"), end="")
    return 0
