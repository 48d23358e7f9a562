"""Input that verbs share: options that take pairs, and files of limited size."""

import sys

import click

from pyshim.model.errors import InvalidArgument


def pairs(_ctx: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> dict[str, str]:
    """The callback of a repeatable option `NAME=VALUE`."""
    found: dict[str, str] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not name or not value or name in found:
            raise click.BadParameter(f"{text!r} is not {parameter.metavar} with a name of its own")
        found[name] = value
    return found


def read_limited(path: str, max_bytes: int) -> bytes:
    """The content of the file; `-` is stdin. Raises OSError, InvalidArgument for more than `max_bytes`."""
    if path == "-":
        content = sys.stdin.buffer.read(max_bytes + 1)
    else:
        with open(path, "rb") as file:
            content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise InvalidArgument(f"read '{path}': more than {max_bytes} bytes")
    return content
