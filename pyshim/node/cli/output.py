"""Printing and options that verbs share: JSON for programs, tables for people, colour for terminals."""

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import click

_UNLIMITED = 10_000
"""Columns of a table that goes to a file or a program: no cell is cut there."""

config_option = click.option("--config", "config_path", metavar="FILE", help="Default: the one a sandbox would read.")
json_option = click.option("--json", "as_json", is_flag=True, help="For programs.")


def examples(*lines: str) -> str:
    """The epilog of a command's help."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def print_json(document: object) -> None:
    print(json.dumps(document, indent=2))


def print_table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[str] = (), wrap: str = ""
) -> None:
    """Prints a line for each row. `right` names the columns of numbers, `wrap` the column whose cells may take several
    lines of a terminal."""
    from rich.console import Console

    if sys.stdout.isatty():
        Console(highlight=False).print(table(headings, rows, right=right, wrap=wrap))
        return
    # A program gets whole lines, without the blanks that fill the last column.
    console = Console(width=_UNLIMITED, highlight=False, color_system=None)
    with console.capture() as captured:
        console.print(table(headings, rows, right=right, wrap=wrap))
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[str] = (), wrap: str = "") -> Any:
    """The rows of `print_table` as a table of rich."""
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for heading in headings:
        made.add_column(heading, justify="right" if heading in right else "left", no_wrap=heading != wrap)
    for row in rows:
        made.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in row))
    return made


STYLES = {"ok": "green", "warning": "yellow", "missing": "red", "dead": "red", "not responding": "red"}
"""The colour of a cell that is exactly this word."""
