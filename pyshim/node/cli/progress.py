"""Progress of long work at a terminal: a line on stderr that is erased at the end. Without a terminal, no output."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

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
