"""`pyshim top`: `pyshim list`, live."""

import json
import sys
import time

import click

from pyshim.node.cli.health import with_health
from pyshim.node.cli.output import examples, print_table, table
from pyshim.node.cli.sandbox import state_dir_option
from pyshim.node.cli.sandbox_table import HEADINGS, NUMBERS, as_document, cells
from pyshim.node.cli.sandboxes import SandboxRow, sandboxes
from pyshim.node.cli.usage import Usage, UsageMeter


@click.command(epilog=examples("pyshim top", "pyshim top --interval 10 --count 6 --json >> usage.jsonl"))
@click.option("--interval", type=click.FloatRange(min=0.1, max=3600), default=2.0, show_default=True, metavar="SECONDS")
@click.option("--count", type=click.IntRange(min=1), metavar="N", help="End after so many looks; default: Ctrl-C.")
@state_dir_option
@click.option("--json", "as_json", is_flag=True, help="For programs: a line for each look.")
def command(interval: float, count: int | None, state_dir: str, as_json: bool) -> int:
    """Show the sandboxes of this node and what they use, most CPU first, again and again.

    The columns are those of 'pyshim list'.
    """
    meter = UsageMeter()
    meter.measure(sandboxes(state_dir))
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
            found = with_health(sandboxes(state_dir), state_dir)
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
