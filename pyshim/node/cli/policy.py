"""`pyshim policy set`: the policy by which a guest's agent judges requests, through the sandbox's shim."""

import click

from pyshim.model.errors import InvalidArgument
from pyshim.model.observation import MAX_MONITOR_BODY_BYTES
from pyshim.node.cli.inputs import read_limited
from pyshim.node.cli.monitor_client import ask_sandbox
from pyshim.node.cli.output import examples
from pyshim.node.cli.sandbox import named_sandbox, sandbox_id_option, state_dir_option

TARGET = "/policy"
"""Kata's path on the monitor socket."""


@click.group(epilog=examples("pyshim policy set 1a2b policy.rego", "pyshim policy set --sandbox-id 1a2b policy.rego"))
def command() -> None:
    """Replace the policy of a sandbox's guest."""


@command.command("set")
@click.argument("words", metavar="SANDBOX FILE", nargs=-1)
@sandbox_id_option
@state_dir_option
def _set(words: tuple[str, ...], named: str, state_dir: str) -> int:
    """Replace the policy by that of FILE, in Rego; - is stdin. The present policy decides whether this is allowed."""
    sandbox, (path,) = named_sandbox(words, named, further=1)
    content = read_limited(path, MAX_MONITOR_BODY_BYTES)
    if not content.strip():
        raise InvalidArgument(f"read policy of '{path}': it is empty")
    ask_sandbox(state_dir, sandbox, "PUT", TARGET, content)
    return 0
