"""`pyshim debug topology`: which PCI ports a VM of this configuration has, and where devices go."""

import argparse
import os

from hypervisors.base import EmulatedDevice, PciDevice
from pyshim.config.load import build_config
from pyshim.config.sources import read_source
from pyshim.host.vfio import vfio_node
from pyshim.model.errors import FailedPrecondition
from pyshim.model.task import RuntimeOptions
from pyshim.plan.devices import port_request, vfio_devices
from pyshim.plan.pci_topology import pci_layout, topology_lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    topology = actions.add_parser("topology", help="draw the PCI ports of a VM, its devices and their guest paths")
    topology.add_argument("file", nargs="?", metavar="FILE", help="default: the one a sandbox would read")
    topology.add_argument(
        "--node",
        action="append",
        default=[],
        metavar="/dev/vfio/N",
        help="pass this IOMMU group or function of the host through; repeatable",
    )
    topology.add_argument(
        "--devices", type=int, default=0, metavar="N", help="N devices more, of no host: to see what fits"
    )


def run(arguments: argparse.Namespace) -> int:
    options = RuntimeOptions(config_path=os.path.abspath(arguments.file), config_body=b"") if arguments.file else None
    config = build_config(read_source(options, dict(os.environ)))
    if config.hypervisor.machine_type != "q35":
        raise FailedPrecondition(f"draw the ports of '{config.source}': {config.hypervisor.machine_type} has none")
    devices: list[PciDevice] = list(vfio_devices(vfio_node(path) for path in arguments.node))
    devices += [EmulatedDevice(id=f"device{index}", model="any") for index in range(arguments.devices)]
    request = port_request(config)
    print("\n".join(topology_lines(pci_layout(request, devices, where=config.source), request.bridges)))
    return 0
