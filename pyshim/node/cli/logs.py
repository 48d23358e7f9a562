"""`pyshim logs SANDBOX`: its shim's lines in the container runtime's log, and its guest's console."""

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress

import click
from msgspec import Struct, to_builtins

from pyshim.host.os_errors import describe_os_error
from pyshim.model.errors import FailedPrecondition, NotFound
from pyshim.node.cli.output import examples, json_option, print_json
from pyshim.node.cli.sandbox import ended_or_recorded, sandbox_argument, state_dir_option
from pyshim.node.install.runtime import container_runtime

VM_ROOT = "/run/vc/vm"
LEVELS = ("debug", "info", "warning", "error", "fatal")
_COLOURS = {"warning": "yellow", "error": "red", "fatal": "red", "debug": "dim"}
_PAIR = re.compile(r'([\w.\-]+)=("(?:[^"\\]|\\.)*"|\S*)(?:\s+|$)')
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.)")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}
_CONSOLE_FILES = ("console.log.1", "console.log")
"""The older one first."""


class Entry(Struct, frozen=True, kw_only=True):
    """One line. `time`, `level` and `fields` are empty for lines of the console, which have none."""

    source: str
    """`shim` or `console`."""
    time: str
    level: str
    message: str
    fields: dict[str, str]


@click.command(
    epilog=examples(
        "pyshim logs 1a2b",
        "pyshim logs 1a2b --level warning --unit containerd.service",
        "pyshim logs 1a2b --file /var/log/containerd.log --json",
    )
)
@sandbox_argument
@click.option(
    "--file", "path", metavar="FILE", help="The runtime's log in a file, or - for stdin; default: the journal."
)
@click.option("--unit", default="", help="In the journal; default: that of this node's container runtime.")
@click.option("--level", type=click.Choice(LEVELS), default="debug", help="The least that is shown of the shim.")
@click.option("--only", type=click.Choice(["shim", "console"]), help="One of the two.")
@click.option("--vm-root", default=VM_ROOT, hidden=True)
@state_dir_option
@json_option
def command(
    sandbox: str, path: str | None, unit: str, level: str, only: str | None, vm_root: str, state_dir: str, as_json: bool
) -> int:
    """Show the lines of a sandbox's shim, from its container runtime's log, then those of its guest's console.

    A sandbox that has ended may be named by its whole id: its shim's lines stay in the journal, its console is gone.
    """
    found = ended_or_recorded(sandbox, state_dir)
    entries = [] if only == "console" else list(shim_entries(_log_lines(path, unit, found), found, level))
    if only != "shim":
        entries += console_entries(f"{vm_root}/{found}")
    if not entries and not os.path.isdir(f"{state_dir}/{found}"):
        raise NotFound(f"find sandbox '{found}': no sandbox that begins so is recorded here, and no line names it")
    if as_json:
        print_json(to_builtins(entries))
        return 0
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    for entry in entries:
        console.print(Text(text_of(entry), style=_COLOURS.get(entry.level, "")))
    return 0


def _log_lines(path: str | None, unit: str, found: str) -> Iterator[str]:
    """Raises OSError, FailedPrecondition when the journal cannot be read."""
    if path == "-":
        yield from sys.stdin
    elif path is not None:
        with open(path, encoding="utf-8", errors="replace") as file:
            yield from file
    else:
        yield from _journal(unit or container_runtime().unit, found)


def _journal(unit: str, found: str) -> Iterator[str]:
    hint = "(hint: --file FILE reads another log)"
    argv = ["journalctl", "--unit", unit, "--output", "cat", "--no-pager", "--quiet"]
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise FailedPrecondition(
            f"read journal for '{found}': journalctl: {describe_os_error(error)} {hint}"
        ) from error
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        yield from process.stdout
        complaint = " ".join(process.stderr.read(1000).split())
    if process.returncode:
        raise FailedPrecondition(f"read journal for '{found}': {complaint or f'exit {process.returncode}'} {hint}")


def shim_entries(lines: Iterable[str], found: str, least: str = "debug") -> Iterator[Entry]:
    """Lines that name the sandbox in a field, parsed; those of the runtime about it are among them."""
    threshold = LEVELS.index(least)
    for line in lines:
        if found not in line:
            continue
        fields = parsed(line)
        if found not in fields.values():
            continue
        level = fields.pop("level", "info")
        if level in LEVELS and LEVELS.index(level) < threshold:
            continue
        yield Entry(
            source="shim",
            time=fields.pop("time", ""),
            level=level,
            message=fields.pop("msg", ""),
            fields={name: value for name, value in fields.items() if (name, value) != ("sandbox", found)},
        )


def parsed(line: str) -> dict[str, str]:
    """The pairs of a line as logrus writes it; what stands before the first, for instance syslog's head, is skipped."""
    start = line.find("time=")
    fields = {}
    for match in _PAIR.finditer(line, max(start, 0)):
        value = match[2]
        if value.startswith('"') and len(value) > 1:
            value = _ESCAPE.sub(_unescaped, value[1:-1])
        fields[match[1]] = value
    return fields


def _unescaped(match: re.Match[str]) -> str:
    escape = match[1]
    if escape.startswith("u") and len(escape) == 5:
        return chr(int(escape[1:], 16))
    return _ESCAPES.get(escape, escape)


def console_entries(vm_dir: str) -> Iterator[Entry]:
    """The guest's lines, as far as the shim has kept them; none once the VM is gone."""
    for name in _CONSOLE_FILES:
        with suppress(FileNotFoundError), open(f"{vm_dir}/{name}", encoding="utf-8", errors="replace") as file:
            for line in file:
                yield Entry(source="console", time="", level="", message=line.rstrip("\r\n"), fields={})


def text_of(entry: Entry) -> str:
    """One line, without what a guest could steer a terminal with."""
    words = [entry.time, f"{entry.level:<7}", entry.message] if entry.source == "shim" else ["console", entry.message]
    words += [f"{name}={value}" for name, value in entry.fields.items()]
    return "".join(character if character.isprintable() else " " for character in " ".join(words)).rstrip()
