"""`pyshim state ID`: what is recorded about a sandbox, without asking its shim."""

import argparse
import json
import os
from typing import Any

from pyshim.model.errors import Internal, NotFound
from pyshim.model.ids import checked_id

STATE_DIR = "/run/vc/sbs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", metavar="ID", help="sandbox id")
    parser.add_argument("--state-dir", default=STATE_DIR, metavar="DIR", help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="the whole record as it is on disk")


def run(arguments: argparse.Namespace) -> int:
    record = read_record(arguments.state_dir, arguments.id)
    print(json.dumps(record, indent=2) if arguments.json else "\n".join(summary(record)))
    return 0


def read_record(state_dir: str, sandbox_id: str) -> dict[str, Any]:
    """The sandbox's persist.json; raises NotFound, or Internal when it cannot be read as one."""
    path = os.path.join(state_dir, checked_id(sandbox_id, "sandbox id"), "persist.json")
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
