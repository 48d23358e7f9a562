"""`pyshim list`: the sandboxes of this node, the sizes of their VMs, what they use, and their health.

A shim asks its guest's agent for its health before it answers.
"""

import asyncio
import json
import sys
import time
from collections.abc import Sequence

import click
from msgspec.structs import replace

from pyshim.model.decoding import damaged, from_json
from pyshim.model.errors import FailedPrecondition, InvalidArgument, ShimError
from pyshim.model.observation import Health
from pyshim.node.cli.monitor import monitor_socket
from pyshim.node.cli.output import examples, json_option, print_json, print_table, table
from pyshim.node.cli.sandboxes import RUNS, SandboxRow, sandbox_id, sandboxes, state_dir_option
from pyshim.node.cli.usage import Usage, UsageMeter
from pyshim.node.monitor.shims import shim_answer

HEADINGS = ("ID", "POD", "AGE", "CONTAINERS", "ASKED", "VM", "START", "CPU", "MEMORY", "AGENT", "HEALTH")
NUMBERS = ("AGE", "CONTAINERS", "ASKED", "VM", "CPU", "MEMORY", "AGENT")
_SHORT_ID = 13
"""Characters of an id on a terminal. Every verb accepts the beginning of an id."""
ASK_S = 2.0
"""Seconds for a shim's answer; it gives the agent one."""
SAMPLE_S = 0.3
"""Seconds over which the use of CPUs is measured."""


@click.command(
    epilog=examples(
        "pyshim list",
        "pyshim list --json | jq -r '.[] | select(.health != \"ok\").id'",
        "pyshim list --watch",
        "pyshim list --watch --interval 10 --count 6 --json >> usage.jsonl",
    )
)
@click.argument("prefix", metavar="[SANDBOX]", default="")
@click.option("--watch", is_flag=True, help="Again and again, most CPU first, until Ctrl-C; with --json a line a look.")
@click.option("--interval", type=click.FloatRange(min=0.1, max=3600), default=2.0, show_default=True, metavar="SECONDS")
@click.option("--count", type=click.IntRange(min=1), metavar="N", help="With --watch: end after so many looks.")
@state_dir_option
@json_option
def list_command(prefix: str, watch: bool, interval: float, count: int | None, state_dir: str, as_json: bool) -> int:
    """List the sandboxes of this node, or those whose ids begin with SANDBOX, or those of the pod SANDBOX.

    ASKED is what their containers ask for, VM what the virtual machine has, both CPUs and memory. CPU, in percent of
    one CPU, and MEMORY are what shim, VMM and file server use now. HEALTH comes from states and processes, then from
    the guest's agent, which its shim asks; AGENT is the age of its last answer. --json also names the installed release
    that each shim runs.
    """
    if watch:
        return _watch(prefix, interval, count, state_dir, as_json=as_json)
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


def _watch(prefix: str, interval: float, count: int | None, state_dir: str, *, as_json: bool) -> int:
    meter = UsageMeter()
    found = _named(prefix, state_dir)
    meter.measure(found)
    if prefix and not any(each.id.startswith(prefix) for each in found):
        prefix = found[0].id  # it names a pod
    live = None
    if sys.stdout.isatty() and not as_json:
        from rich.live import Live

        live = Live(auto_refresh=False, screen=count is None)
        live.start()
    try:
        looks = 0
        while count is None or looks < count:
            time.sleep(interval)
            looks += 1
            found = with_health(sandboxes(state_dir, prefix=prefix), state_dir)
            usage = meter.measure(found)
            now_ns = time.time_ns()
            if as_json:
                lines = [as_document(each, usage[each.id], now_ns=now_ns) for each in found]
                print(json.dumps({"time_ns": now_ns, "sandboxes": lines}), flush=True)
            elif live is not None:
                rows = _rows(found, usage, now_ns, whole_ids=False)
                live.update(table(HEADINGS, rows, right=NUMBERS, wrap="HEALTH"), refresh=True)
            else:
                print_table(HEADINGS, _rows(found, usage, now_ns, whole_ids=True), right=NUMBERS, wrap="HEALTH")
                sys.stdout.flush()
    except KeyboardInterrupt:
        pass  # the ordinary end
    finally:
        if live is not None:
            live.stop()
    return 0


def _rows(found: list[SandboxRow], usage: dict[str, Usage], now_ns: int, *, whole_ids: bool) -> list[tuple[str, ...]]:
    busiest = sorted(found, key=lambda each: -usage[each.id].cpu_percent)
    return [cells(each, usage[each.id], now_ns=now_ns, whole_ids=whole_ids) for each in busiest]


def cells(sandbox: SandboxRow, usage: Usage, *, now_ns: int, whole_ids: bool) -> tuple[str, ...]:
    return (
        sandbox.id if whole_ids else sandbox.id[:_SHORT_ID],
        sandbox.pod or "-",
        age_text((now_ns - sandbox.started_ns) // 10**9) if sandbox.started_ns else "-",
        str(sandbox.containers),
        f"{sandbox.requested_vcpus:g} / {sandbox.requested_memory_mib:.0f}Mi" if sandbox.vcpus else "-",
        f"{sandbox.vcpus} / {sandbox.memory_mib}Mi" if sandbox.vcpus else "-",
        "clone" if sandbox.origin.startswith("cloned") else "boot" if sandbox.origin else "-",
        f"{usage.cpu_percent:.1f}%" if sandbox.processes else "-",
        f"{usage.memory_mib}Mi" if sandbox.processes else "-",
        "-" if sandbox.agent_age_s is None else age_text(int(sandbox.agent_age_s)),
        sandbox.health,
    )


def as_document(sandbox: SandboxRow, usage: Usage, *, now_ns: int) -> dict[str, object]:
    """The sandbox as a JSON object."""
    return {
        "id": sandbox.id,
        "pod": sandbox.pod,
        "containers": sandbox.containers,
        "age_s": max(now_ns - sandbox.started_ns, 0) // 10**9 if sandbox.started_ns else None,
        "requested": {"vcpus": sandbox.requested_vcpus, "memory_mib": sandbox.requested_memory_mib},
        "vm": {"vcpus": sandbox.vcpus, "memory_mib": sandbox.memory_mib},
        "release": sandbox.release,
        "origin": sandbox.origin,
        "used": {"cpu_percent": usage.cpu_percent, "memory_mib": usage.memory_mib},
        "agent_age_s": sandbox.agent_age_s,
        "health": sandbox.health,
    }


def age_text(seconds: int) -> str:
    """An age with one unit, in the form of kubectl: `42s`, `7m`, `3h`, `12d`."""
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds // size}{unit}"
    return f"{max(seconds, 0)}s"


def with_health(found: Sequence[SandboxRow], state_dir: str) -> list[SandboxRow]:
    """The sandboxes, with the health of those that run. All shims are asked at the same time, for at most ASK_S."""

    async def ask() -> list[SandboxRow]:
        return list(await asyncio.gather(*(_with_health(each, state_dir) for each in found)))

    return asyncio.run(ask())


async def _with_health(sandbox: SandboxRow, state_dir: str) -> SandboxRow:
    if sandbox.health != RUNS:
        return sandbox
    try:
        text = await shim_answer(monitor_socket(state_dir, sandbox.id), "/health", within_s=ASK_S)
        answer = from_json(text, Health, damaged("/health"))
    except FailedPrecondition:
        return sandbox  # a shim of an older release has no such path
    except InvalidArgument:
        return replace(sandbox, health="its shim answers nonsense")
    except ShimError:
        return replace(sandbox, health="its shim does not answer")
    return replace(sandbox, health=answer.problem or "ok", agent_age_s=answer.agent_age_s)
