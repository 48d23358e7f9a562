"""`pyshim metrics SANDBOX`: what its shim answers to a scrape."""

import click

from pyshim.node.cli.monitor_client import ask_sandbox
from pyshim.node.cli.output import examples
from pyshim.node.cli.sandbox import sandbox_argument, state_dir_option


@click.command(epilog=examples("pyshim metrics 1a2b | grep pyshim_vm"))
@sandbox_argument
@state_dir_option
def command(sandbox: str, state_dir: str) -> int:
    """Print the metrics of a sandbox, in Prometheus' text format."""
    print(ask_sandbox(state_dir, sandbox, "GET", "/metrics"), end="")
    return 0
