"""`pyshim version`."""

import platform

import click

from pyshim import __version__
from pyshim.node.cli.output import json_option, print_json


@click.command()
@json_option
def command(as_json: bool) -> int:
    """Print the versions of pyshim and of Python."""
    if as_json:
        print_json({"pyshim": __version__, "python": platform.python_version(), "machine": platform.machine()})
    else:
        print(f"pyshim {__version__} (Python {platform.python_version()}, {platform.machine()})")
    return 0
