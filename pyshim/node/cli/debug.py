"""`pyshim debug topology`: which PCI ports a VM of this configuration has, and where devices go."""

import os

import click

from pyshim.config.load import build_config
from pyshim.config.sources import named_file, read_source
from pyshim.model.errors import FailedPrecondition
from pyshim.model.vm import EmulatedDevice, PciDevice
from pyshim.node.cli.output import json_option, print_json
from pyshim.resources.devices.host.vfio import vfio_node
from pyshim.resources.devices.plan.devices import port_request, vfio_devices
from pyshim.resources.devices.plan.pci_topology import pci_layout, topology_lines


@click.group()
def command() -> None:
    """Draw what the shim would decide."""


@command.command()
@click.argument("file", metavar="[FILE]", required=False)
@click.option(
    "--node",
    "nodes",
    multiple=True,
    metavar="/dev/vfio/N",
    help="Pass this IOMMU group or function of the host through; repeatable.",
)
@click.option("--devices", "count", type=int, default=0, metavar="N", help="N devices more, of no host: what fits.")
@json_option
def topology(file: str | None, nodes: tuple[str, ...], count: int, as_json: bool) -> int:
    """Draw the PCI ports of a VM of this configuration, its devices and their guest paths.

    FILE is by default the configuration that a sandbox would read.
    """
    config = build_config(read_source(named_file(file), dict(os.environ)))
    if config.hypervisor.machine_type != "q35":
        raise FailedPrecondition(f"draw the ports of '{config.source}': {config.hypervisor.machine_type} has none")
    devices: list[PciDevice] = list(vfio_devices(vfio_node(path) for path in nodes))
    devices += [EmulatedDevice(id=f"device{index}", model="any") for index in range(count)]
    request = port_request(config)
    lines = list(topology_lines(pci_layout(request, devices, where=config.source), request.bridges))
    if as_json:
        print_json({"configuration": config.source, "lines": lines})
    else:
        print("\n".join(lines))
    return 0
