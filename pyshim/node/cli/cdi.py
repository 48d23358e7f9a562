"""`pyshim cdi list|resolve`: the devices that specs of this node define, and their edits of a container."""

import json
import sys
from typing import Any

import click

from pyshim.cdi import DEFAULT_DIRECTORIES, Cache, CdiError, as_json, is_qualified_name
from pyshim.model.errors import InvalidArgument, NotFound
from pyshim.node.cli.output import examples, json_option, print_json

_directory_option = click.option(
    "--directory",
    "directories",
    multiple=True,
    metavar="DIR",
    help=f"Repeatable, a later one wins; default: {' '.join(DEFAULT_DIRECTORIES)}.",
)


@click.group(epilog=examples("pyshim cdi list", "pyshim cdi resolve vendor.com/gpu=0 --oci config.json"))
def command() -> None:
    """List and resolve the devices of this node's CDI specs."""


@command.command("list")
@_directory_option
@json_option
def show(directories: tuple[str, ...], as_json: bool) -> int:
    """List every device, and the errors in specs; exit 1 when there are errors."""
    cache = Cache(directories or DEFAULT_DIRECTORIES)
    devices = cache.devices()
    if as_json:
        print_json([{"name": found.name, "file": found.path} for found in devices])
    elif devices:
        width = max(len(found.name) for found in devices)
        print("\n".join(f"{found.name:<{width}}  {found.path}" for found in devices))
    errors = list(dict.fromkeys(str(error) for found in cache.errors().values() for error in found))
    for error in errors:
        print(f"pyshim: {error}", file=sys.stderr)
    return 1 if errors else 0


@command.command()
@click.argument("devices", metavar="VENDOR/CLASS=NAME...", nargs=-1, required=True)
@click.option("--oci", metavar="CONFIG.json", help="Print this OCI spec with the devices injected instead.")
@_directory_option
@click.option("--json", "_as_json", is_flag=True, help="As without it: JSON.")
def resolve(devices: tuple[str, ...], oci: str | None, directories: tuple[str, ...], _as_json: bool) -> int:
    """Print the edits that the devices make to a container, as containerEdits."""
    cache = Cache(directories or DEFAULT_DIRECTORIES)
    try:
        if not oci:
            print_json(as_json(cache.edits(devices)))
            return 0
        document = _oci_spec(oci)
        cache.inject(document, devices)
    except CdiError as error:
        wrong = [name for name in devices if not is_qualified_name(name)]
        raise (InvalidArgument if wrong else NotFound)(str(error)) from error
    print_json(document)
    return 0


def _oci_spec(path: str) -> dict[str, Any]:
    with open(path, encoding="utf-8") as file:
        try:
            document = json.load(file)
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(f"read spec '{path}': not JSON: {error}") from error
    if not isinstance(document, dict):
        raise InvalidArgument(f"read spec '{path}': the document is not an object")
    return document
