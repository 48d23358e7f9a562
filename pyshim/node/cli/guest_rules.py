"""`pyshim iptables` and `policy`: the guest's packet filter, and the policy by which its agent judges requests.

Both go through the sandbox's shim, on Kata's paths.
"""

import sys

import click

from pyshim.model.errors import InvalidArgument
from pyshim.model.observation import MAX_MONITOR_BODY_BYTES
from pyshim.node.cli.monitor import ask_sandbox
from pyshim.node.cli.options import read_limited
from pyshim.node.cli.output import examples, json_option, print_json
from pyshim.node.cli.sandboxes import named_sandbox, sandbox_id_option, state_dir_option


@click.group(
    epilog=examples(
        "pyshim iptables get 1a2b",
        "pyshim iptables set 1a2b rules.txt",
        "pyshim iptables get --sandbox-id 1a2b --v6",
    )
)
def iptables() -> None:
    """Read or replace the iptables rules within a sandbox's guest."""


def target(v6: bool) -> str:
    return "/ip6tables" if v6 else "/iptables"


@iptables.command("get")
@click.argument("words", metavar="SANDBOX", nargs=-1)
@sandbox_id_option
@click.option("--v6", is_flag=True, help="Those of IPv6.")
@state_dir_option
@json_option
def _get(words: tuple[str, ...], named: str, v6: bool, state_dir: str, as_json: bool) -> int:
    """Print the rules, as iptables-save does."""
    sandbox, _ = named_sandbox(words, named, further=0)
    rules = ask_sandbox(state_dir, sandbox, "GET", target(v6))
    if as_json:
        print_json({"rules": rules.splitlines()})
    else:
        sys.stdout.write(rules if rules.endswith("\n") or not rules else f"{rules}\n")
    return 0


@iptables.command("set")
@click.argument("words", metavar="SANDBOX FILE", nargs=-1)
@sandbox_id_option
@click.option("--v6", is_flag=True, help="Those of IPv6.")
@state_dir_option
def _set_rules(words: tuple[str, ...], named: str, v6: bool, state_dir: str) -> int:
    """Replace the rules by those of FILE, in the format of iptables-save; - is stdin."""
    sandbox, (path,) = named_sandbox(words, named, further=1)
    ask_sandbox(state_dir, sandbox, "PUT", target(v6), read_limited(path, MAX_MONITOR_BODY_BYTES))
    return 0


@click.group(epilog=examples("pyshim policy set 1a2b policy.rego", "pyshim policy set --sandbox-id 1a2b policy.rego"))
def policy() -> None:
    """Replace the policy of a sandbox's guest."""


@policy.command("set")
@click.argument("words", metavar="SANDBOX FILE", nargs=-1)
@sandbox_id_option
@state_dir_option
def _set_policy(words: tuple[str, ...], named: str, state_dir: str) -> int:
    """Replace the policy by that of FILE, in Rego; - is stdin. The present policy decides whether this is allowed."""
    sandbox, (path,) = named_sandbox(words, named, further=1)
    content = read_limited(path, MAX_MONITOR_BODY_BYTES)
    if not content.strip():
        raise InvalidArgument(f"read policy of '{path}': it is empty")
    ask_sandbox(state_dir, sandbox, "PUT", "/policy", content)
    return 0
