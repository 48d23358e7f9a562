"""`pyshim list`: the sandboxes of this node, with the sizes of their VMs and what they use."""

import sys
import time

import click

from pyshim.node.cli.health import with_health
from pyshim.node.cli.output import examples, json_option, print_json, print_table
from pyshim.node.cli.sandbox import sandbox_id, state_dir_option
from pyshim.node.cli.sandbox_table import HEADINGS, NUMBERS, as_document, cells
from pyshim.node.cli.sandboxes import SandboxRow, sandboxes
from pyshim.node.cli.usage import UsageMeter

SAMPLE_S = 0.3
"""Seconds over which the use of CPUs is measured."""


@click.command(epilog=examples("pyshim list", "pyshim list --json | jq -r '.[] | select(.health != \"ok\").id'"))
@click.argument("prefix", metavar="[SANDBOX]", default="")
@state_dir_option
@json_option
def command(prefix: str, state_dir: str, as_json: bool) -> int:
    """List the sandboxes of this node, or those whose ids begin with SANDBOX, or those of the pod SANDBOX.

    ASKED is what their containers ask for, VM what the virtual machine has, both CPUs and memory. CPU, in percent of
    one CPU, and MEMORY are what shim, VMM and file server use now. HEALTH comes from states and processes, then from
    the guest's agent, which its shim asks; AGENT is the age of its last answer. --json also names the installed release
    that each shim runs.
    """
    found = _named(prefix, state_dir)
    meter = UsageMeter()
    if found:
        meter.measure(found)
        time.sleep(SAMPLE_S)
    usage = meter.measure(found)
    found = with_health(found, state_dir)
    now_ns = time.time_ns()
    if as_json:
        print_json([as_document(each, usage[each.id], now_ns=now_ns) for each in found])
        return 0
    whole = not sys.stdout.isatty()
    rows = [cells(each, usage[each.id], now_ns=now_ns, whole_ids=whole) for each in found]
    print_table(HEADINGS, rows, right=NUMBERS, wrap="HEALTH")
    return 0


def _named(text: str, state_dir: str) -> list[SandboxRow]:
    """Raises NotFound when `text` names none, InvalidArgument when it cannot be a name, or names several."""
    found = sandboxes(state_dir, prefix=text)
    if text and not found:
        found = sandboxes(state_dir, prefix=sandbox_id(text, state_dir))
    return found
