"""How verbs print: JSON for programs, tables for people, colour and progress for terminals."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

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


T = TypeVar("T")


@contextmanager
def steps() -> Iterator[Callable[[str], None]]:
    """Yields a function that shows the text of the present step, and the time since the first."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    with _line(SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()) as line:
        task = line.add_task("", total=None)
        yield lambda text: line.update(task, description=text)


def counted(items: Iterable[T], what: str) -> Iterator[T]:
    """The same items. A bar shows the number of the present one and the total."""
    known = tuple(items)
    if not sys.stderr.isatty() or not known:
        yield from known
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

    with _line(TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn()) as line:
        yield from line.track(known, description=what)


def _line(*columns: "ProgressColumn") -> "Progress":
    from rich.console import Console
    from rich.progress import Progress

    # Output printed meanwhile stands above the line; output to a file or a program is unchanged.
    return Progress(
        *columns,
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=sys.stdout.isatty(),
        redirect_stderr=True,
    )
