"""`pyshim dra run|slices|withdraw`: devices of remote VMs, offered to the scheduler and prepared on this node."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pyshim.node.cli.output import examples, print_json
from pyshim.node.cli.service import run_with_api, with_api

if TYPE_CHECKING:
    from pyshim.node.kubernetes.api import Access, Api

_TABLE = Path("/etc/pyshim/instances.toml")
_table_option = click.option(
    "--types",
    type=click.Path(path_type=Path),
    default=_TABLE,
    show_default=True,
    metavar="FILE",
    help="The instance types and their devices.",
)
_directory = click.Path(path_type=Path, file_okay=False)


@click.group(epilog=examples("pyshim dra slices --types instances.toml"))
def command() -> None:
    """Offer the devices of a cloud's instances to pods with remote VMs (DRA driver)."""


@command.command()
@_table_option
@click.option("--kubelet-root", type=_directory, default=Path("/var/lib/kubelet"), show_default=True, metavar="DIR")
@click.option("--cdi", type=_directory, default=Path("/var/run/cdi"), show_default=True, metavar="DIR")
@click.option(
    "--copy", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Write the table in use for shims."
)
@with_api
def run(types: Path, kubelet_root: Path, cdi: Path, copy: Path | None, access: "Access") -> int:
    """Offer the devices and prepare claims on this node, until SIGTERM.

    The table is read again when it changes. When the driver ends, its devices stay offered and its claims prepared.
    """
    from pyshim.node.dra.claims import Claims
    from pyshim.node.dra.offer import keep_offered, read_table
    from pyshim.node.dra.plugin import DraPlugin, registered
    from pyshim.node.dra.slices import DRIVER

    read_table(types)  # a start with an unusable table fails
    claims = Claims(specs=cdi, records=kubelet_root / "plugins" / DRIVER / "claims")

    async def work(api: "Api") -> None:
        async with registered(DraPlugin(api, claims), kubelet_root):
            await keep_offered(api, types, copy)

    return run_with_api(access, work)


@command.command()
@_table_option
def slices(types: Path) -> None:
    """Print the ResourceSlices that the table makes, as JSON."""
    from pyshim.node.dra.offer import read_table
    from pyshim.node.dra.slices import objects, slice_specs

    print_json(objects(slice_specs(read_table(types)[1]), 1))


@command.command()
@with_api
def withdraw(access: "Access") -> int:
    """Withdraw all devices, once the driver has ended on every node."""
    from pyshim.node.dra.offer import withdraw as withdrawn

    return run_with_api(access, withdrawn)
