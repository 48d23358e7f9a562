"""`pyshim state SANDBOX`: what is recorded about a sandbox, without asking its shim."""

import json
import os
from typing import Any

import click

from pyshim.model.errors import Internal, NotFound
from pyshim.node.cli.output import examples, print_json
from pyshim.node.cli.sandbox import sandbox_argument, sandbox_id, state_dir_option
from pyshim.state.store import FILE_NAME


@click.command(epilog=examples("pyshim state 1a2b", "pyshim state 1a2b --json | jq .Pyshim.Snapshot.Sizing"))
@sandbox_argument
@state_dir_option
@click.option("--json", "as_json", is_flag=True, help="The whole record as it is on disk.")
def command(sandbox: str, state_dir: str, as_json: bool) -> int:
    """Show what is recorded about a sandbox on this node."""
    record = _record(state_dir, sandbox_id(sandbox, state_dir))
    if as_json:
        print_json(record)
    else:
        print("\n".join(summary(record)))
    return 0


def _record(state_dir: str, found: str) -> dict[str, Any]:
    """The persist.json of the sandbox, another runtime's and a damaged one, too.

    Raises NotFound without such a file, Internal when it is not a JSON object.
    """
    path = os.path.join(state_dir, found, FILE_NAME)
    try:
        with open(path, "rb") as file:
            record = json.load(file)
    except FileNotFoundError as error:
        raise NotFound(f"read state {path!r}: no sandbox of this id is recorded") from error
    except ValueError as error:
        raise Internal(f"parse state {path!r}: {error}") from error
    if not isinstance(record, dict):
        raise Internal(f"parse state {path!r}: not a JSON object")
    return record


def summary(record: dict[str, Any], indent: str = "") -> list[str]:
    """One line per fact, nested by indentation; empty values are left out."""
    lines = []
    for key, value in record.items():
        if value in (None, "", [], {}):
            continue
        if isinstance(value, dict):
            lines += [f"{indent}{key}:", *summary(value, indent + "  ")]
        elif isinstance(value, list):
            lines.append(f"{indent}{key}:")
            for item in value:
                nested = summary(item, indent + "    ") if isinstance(item, dict) else [f"{indent}    {item}"]
                lines += [f"{indent}  -{nested[0][len(indent) + 3 :]}", *nested[1:]] if nested else []
        else:
            lines.append(f"{indent}{key}: {value}")
    return lines
