"""`pyshim cdi list|validate|resolve`: the devices that specs of this node define, and what they do to a container."""

import argparse
import json
import sys
from typing import Any

from pyshim.cdi import (
    DEFAULT_DIRECTORIES,
    Cache,
    CdiError,
    as_json,
    is_qualified_name,
    minimum_version,
    read_spec,
)
from pyshim.cdi.version import is_older, plain_version
from pyshim.model.errors import InvalidArgument, NotFound


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = actions.add_parser("list", help="every device, and what is wrong with specs; exit 1 for the latter")
    listing.add_argument("--json", action="store_true", help="for programs")
    validate = actions.add_parser("validate", help="judge spec files, or all in the directories; exit 1 for errors")
    validate.add_argument("files", nargs="*", metavar="FILE")
    resolve = actions.add_parser("resolve", help="what devices do to a container, as containerEdits")
    resolve.add_argument("devices", nargs="+", metavar="VENDOR/CLASS=NAME")
    resolve.add_argument("--oci", metavar="CONFIG.json", help="print this OCI spec with the devices injected instead")
    for action in (listing, validate, resolve):
        action.add_argument(
            "--directory",
            action="append",
            metavar="DIR",
            help=f"repeatable, a later one wins; default: {' '.join(DEFAULT_DIRECTORIES)}",
        )


def run(arguments: argparse.Namespace) -> int:
    cache = Cache(arguments.directory or DEFAULT_DIRECTORIES)
    if arguments.action == "list":
        return _list(cache, as_document=arguments.json)
    if arguments.action == "validate":
        return _validate(arguments.files, cache)
    return _resolve(cache, arguments)


def _list(cache: Cache, *, as_document: bool) -> int:
    devices = cache.devices()
    if as_document:
        print(json.dumps([{"name": found.name, "file": found.path} for found in devices], indent=2))
    elif devices:
        width = max(len(found.name) for found in devices)
        print("\n".join(f"{found.name:<{width}}  {found.path}" for found in devices))
    return _tell(cache)


def _tell(cache: Cache) -> int:
    errors = list(dict.fromkeys(str(error) for found in cache.errors().values() for error in found))
    for error in errors:
        print(f"pyshim: {error}", file=sys.stderr)
    return 1 if errors else 0


def _validate(files: list[str], cache: Cache) -> int:
    if not files:
        for path, spec in sorted(cache.specs().items()):
            print(_verdict(path, spec))
        return _tell(cache)
    failed = 0
    for path in files:
        try:
            print(_verdict(path, read_spec(path)))
        except CdiError as error:
            failed = 1
            print(f"pyshim: {error}", file=sys.stderr)
    return failed


def _verdict(path: str, spec: Any) -> str:
    needed = minimum_version(spec)
    count = f"{len(spec.devices)} device{'s' if len(spec.devices) != 1 else ''}"
    spare = f", {needed} would do" if is_older(needed, plain_version(spec.cdi_version)) else ""
    return f"{path}: {spec.kind}, {count}, version {spec.cdi_version}{spare}"


def _resolve(cache: Cache, arguments: argparse.Namespace) -> int:
    try:
        if not arguments.oci:
            print(json.dumps(as_json(cache.edits(arguments.devices)), indent=2))
            return 0
        document = _oci_spec(arguments.oci)
        cache.inject(document, arguments.devices)
    except CdiError as error:
        wrong = [name for name in arguments.devices if not is_qualified_name(name)]
        raise (InvalidArgument if wrong else NotFound)(str(error)) from error
    print(json.dumps(document, indent=2))
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
