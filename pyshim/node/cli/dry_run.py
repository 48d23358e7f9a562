"""`pyshim plan BUNDLE|POD.yaml`: what the shim would do for a pod, without touching anything."""

import os

import click

from pyshim.config.sources import named_file
from pyshim.model.devices import DeviceRequest, FoundDevice, PodDevices
from pyshim.model.errors import InvalidArgument
from pyshim.node.cli.dry_run_text import as_document, lines
from pyshim.node.cli.output import config_option, examples, json_option, print_json
from pyshim.node.cli.planned import of_bundle, of_manifest
from pyshim.resources.devices.plan.instances import MOST_OFFERED, VENDOR


@click.command(
    epilog=examples(
        "pyshim plan pod.yaml",
        "pyshim plan /run/containerd/io.containerd.runtime.v2.task/k8s.io/1a2b",
        "pyshim plan pod.yaml --json | jq -r '.[0].argv[]'",
    )
)
@click.argument("source", metavar="BUNDLE|POD.yaml")
@config_option
@click.option(
    "--claimed",
    multiple=True,
    metavar="PRODUCT=NUMBER",
    help="Devices that the scheduler gives to the pod's claims: a remote VM's instance type follows from them.",
)
@json_option
def command(source: str, config_path: str | None, claimed: tuple[str, ...], as_json: bool) -> int:
    """Show the VM, QEMU's command line, mounts, devices and sizes of a pod, without touching anything.

    BUNDLE is a directory with config.json; POD.yaml holds pods, or anything with a pod template.
    """
    options = named_file(config_path)
    devices = _claimed(claimed)
    plans = [of_bundle(source, options, devices)] if os.path.isdir(source) else of_manifest(source, options, devices)
    if as_json:
        print_json([as_document(plan) for plan in plans])
    else:
        print("\n\n".join("\n".join(lines(plan)) for plan in plans))
    return 0


def _claimed(words: tuple[str, ...]) -> PodDevices:
    """The devices that `pyshim dra run` gives to a pod with such claims. Raises InvalidArgument naming the word."""
    names = []
    for word in words:
        product, _, number = word.partition("=")
        if not product or not number.isdecimal() or not 1 <= int(number) <= MOST_OFFERED:
            raise InvalidArgument(f"plan with claimed devices {word!r}: expected PRODUCT=NUMBER, 1 to {MOST_OFFERED}")
        names += [f"{VENDOR}/{product}=planned-{each}" for each in range(int(number))]
    requests = (DeviceRequest(name=name, origin="--claimed") for name in names)
    return PodDevices(devices=tuple(FoundDevice(request=request, nodes=()) for request in requests))
