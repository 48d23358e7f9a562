"""What the verbs of an installation share: options, rights, signals, and the text of changes and errors."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import click

from pyshim.host.os_errors import describe_os_error
from pyshim.model.errors import FailedPrecondition, ShimError
from pyshim.node.install import runtime
from pyshim.node.install.apply import Change
from pyshim.node.install.handlers import installed_handlers
from pyshim.node.install.manifest import Manifest
from pyshim.node.install.plan import PREFIX


def _absolute(_ctx: click.Context, _parameter: click.Parameter, path: str) -> str:
    """Checks a path that is going to be written into files."""
    if not os.path.isabs(path) or os.path.normpath(path) == "/":
        raise click.BadParameter(f"{path!r} is not the absolute path of a directory below the root")
    return os.path.normpath(path)


prefix_option = click.option(
    "--prefix",
    default=PREFIX,
    metavar="DIR",
    show_default=True,
    callback=_absolute,
    help="Where code and guest go.",
)
root_option = click.option(
    "--root", default="/", metavar="DIR", help="A tree in place of this node, for images of nodes."
)
keep_edited_option = click.option(
    "--keep-edited", is_flag=True, help="Leave files that were edited as they are, in place of a refusal."
)
kind_option = click.option(
    "--kind",
    type=click.Choice(list(runtime.KINDS)),
    help="The container runtime, or the Kubernetes that brings it. Default: what this node has.",
)
socket_option = click.option(
    "--socket",
    default="",
    metavar="PATH",
    help="The container runtime's; .../crio.sock is CRI-O's, any other containerd's. Default: that of this node.",
)


@contextmanager
def undone_at_sigterm() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does, by KeyboardInterrupt. The undo of its work ignores both signals."""

    def interrupt(_number: int, _frame: object) -> None:
        for number in before:
            signal.signal(number, lambda _number, _frame: None)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def require_root(root: str) -> None:
    """Raises FailedPrecondition for another user of this node."""
    if root == "/" and os.geteuid() != 0:
        raise FailedPrecondition("change the installation: only root can (hint: --dry-run needs no root)")


def handlers_installed(manifest: Manifest) -> tuple[str, ...]:
    return installed_handlers(tuple(entry.path for entry in manifest.entries))


def print_changes(done: tuple[Change, ...]) -> None:
    for change in done:
        word = "remove" if change.after is None else "change" if change.before is not None else "write"
        print(f"{word} {change.path}")


def failure(what: str, error: OSError | ShimError) -> ShimError:
    """The error with the object's name and the failures of the undo."""
    if isinstance(error, OSError):
        place = f" '{error.filename}'" if error.filename else ""
        text = f"{what}:{place} {describe_os_error(error)}"
    else:
        text = str(error)
    return FailedPrecondition("; ".join((text, *getattr(error, "__notes__", ()))))
