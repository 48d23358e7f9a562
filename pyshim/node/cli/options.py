"""Options and input that verbs share: pairs, handlers, files of limited size."""

import os
import sys
from pathlib import Path

import click

from pyshim.config.load import build_config
from pyshim.config.sources import SHIPPED_PATH, named_file, read_source
from pyshim.model.errors import InvalidArgument
from pyshim.node.install.handlers import Handler, chosen_handlers

node_quotas_option = click.option(
    "--node-cpu-quotas",
    type=click.Choice(["yes", "no"]),
    default="yes",
    show_default=True,
    help="no: the kubelet of the nodes has cpuCFSQuota: false.",
)


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


FORM = "NAME[:BASE][=FILE]"


def handlers_of(words: tuple[str, ...]) -> tuple[Handler, ...]:
    """The handlers, each with the settings of its FILE.

    Raises ShimError for a malformed word, and for settings with which no pod would start.
    """
    return chosen_handlers(words, _settings)


def _settings(handler: Handler, path: str) -> str:
    shipped = os.path.join(os.path.dirname(SHIPPED_PATH), handler.source)
    build_config(read_source(named_file(shipped), {}, on_top=(path,)))
    return Path(path).read_text(encoding="utf-8")
