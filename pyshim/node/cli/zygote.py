"""`pyshim zygote`: becomes the node's zygote, in the foreground, for a service manager.

The zygote has to be started as the shim is (`python -I -S`): its forks keep the interpreter's settings.
"""

import os
import sys

import click

from pyshim.node.cli.launcher import import_paths
from pyshim.start.start import ZYGOTE_DIR


def _seconds(_ctx: click.Context, _parameter: click.Parameter, value: float) -> float:
    if not 0 <= value < 1e9:  # false for "nan", too
        raise click.BadParameter(f"{value} is not a number of seconds")
    return value


@click.command()
@click.option(
    "--idle",
    type=float,
    callback=_seconds,
    default=0.0,
    metavar="SECONDS",
    help="End when unasked for so long; default 0: never.",
)
@click.option("--directory", default=ZYGOTE_DIR, show_default=True, metavar="DIR", help="Of its socket.")
def command(idle: float, directory: str) -> int:
    """Run the node's zygote, which makes shims by forking, in the foreground."""
    code = f"import sys; sys.path += {list(import_paths())!r}; from pyshim.__main__ import main; sys.exit(main())"
    words = ["-idle", str(idle), "-directory", os.path.abspath(directory), "zygote"]
    os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", code, *words])
