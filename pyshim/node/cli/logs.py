"""`pyshim logs SANDBOX`: its shim's lines in the container runtime's log, and its guest's console."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from itertools import chain
from queue import SimpleQueue
from typing import TYPE_CHECKING

import click
from msgspec import Struct, to_builtins

from pyshim.host.os_errors import describe_os_error
from pyshim.model.errors import FailedPrecondition, NotFound, ShimError
from pyshim.model.places import VM_ROOT
from pyshim.node.cli.output import examples, json_option, print_json
from pyshim.node.cli.sandboxes import ended_or_recorded, sandbox_argument, state_dir_option
from pyshim.node.install.runtime import container_runtime

if TYPE_CHECKING:
    from rich.console import Console

LEVELS = ("debug", "info", "warning", "error", "fatal")
_COLOURS = {"warning": "yellow", "error": "red", "fatal": "red", "debug": "dim"}
_CONSOLE_FILES = ("console.log.1", "console.log")
"""The older one first."""
_LOOK_S = 0.3
"""Seconds between two looks at a file that is followed."""
_PAIR = re.compile(r'([\w.\-]+)=("(?:[^"\\]|\\.)*"|\S*)(?:\s+|$)')
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|.)")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}


class LogEntry(Struct, frozen=True, kw_only=True):
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
        "pyshim logs 1a2b --level warning --since '1 hour ago'",
        "pyshim logs 1a2b --tail 20 --follow",
        "pyshim logs 1a2b --file /var/log/containerd.log --json",
    )
)
@sandbox_argument
@click.option(
    "--file", "path", metavar="FILE", help="The runtime's log in a file, or - for stdin; default: the journal."
)
@click.option("--unit", default="", help="In the journal; default: that of this node's container runtime.")
@click.option("--level", type=click.Choice(LEVELS), default="debug", help="The lowest level shown of the shim.")
@click.option("--only", type=click.Choice(["shim", "console"]), help="Only these lines.")
@click.option("--since", default="", metavar="TIME", help="Of the shim, in journalctl's syntax; not with --file.")
@click.option("--tail", type=click.IntRange(min=0), metavar="N", help="Only the last lines of shim and console.")
@click.option("-f", "--follow", is_flag=True, help="Print new lines as they appear, until Ctrl-C.")
@click.option("--vm-root", default=VM_ROOT, hidden=True)
@state_dir_option
@json_option
def command(
    sandbox: str,
    path: str | None,
    unit: str,
    level: str,
    only: str | None,
    since: str,
    tail: int | None,
    follow: bool,
    vm_root: str,
    state_dir: str,
    as_json: bool,
) -> int:
    """Show the lines of a sandbox's shim, from its container runtime's log, then those of its guest's console.

    A sandbox that has ended may be named by its whole id: its shim's lines stay in the journal, its console is gone.
    """
    if since and path is not None:
        raise click.UsageError("--since is for the journal, not for --file")
    found = ended_or_recorded(sandbox, state_dir)
    vm_dir = f"{vm_root}/{found}"
    # Existing lines end where --follow begins.
    now_s = int(time.time())
    console = f"{vm_dir}/{_CONSOLE_FILES[-1]}"
    console_end = _whole_lines_bytes(console) if follow else None
    log_end = _whole_lines_bytes(path) if follow and path is not None and path != "-" else None
    log = _Log(path=path, unit=unit, found=found, end=log_end)
    entries: list[LogEntry] = []
    if only != "console":
        entries += deque(shim_entries(log.lines(since=since, until_s=now_s if follow else None), found, level), tail)
    if only != "shim":
        entries += deque(console_entries(vm_dir, console_end), tail)
    if not entries and not os.path.isdir(f"{state_dir}/{found}"):
        raise NotFound(f"find sandbox '{found}': no recorded id begins with this, and no line names it")
    if as_json and not follow:
        print_json(to_builtins(entries))
        return 0
    sources: list[Iterator[LogEntry]] = []
    if follow and only != "console":
        sources.append(shim_entries(log.coming(since_s=now_s), found, level))
    if follow and only != "shim":
        sources.append(map(_console_entry, _appended(console, console_end or 0)))
    with suppress(KeyboardInterrupt):  # the ordinary end
        for entry in chain(entries, _merged(sources)):
            _print(entry, as_json)
    return 0


def _print(entry: LogEntry, as_json: bool) -> None:
    """Prints a line at once; as JSON each entry is a line, since the output does not end."""
    if as_json:
        print(json.dumps(to_builtins(entry)), flush=True)
        return
    from rich.text import Text

    _console().print(Text(text_of(entry), style=_COLOURS.get(entry.level, "")))


@cache
def _console() -> "Console":
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True)


def _merged(sources: Iterable[Iterator[LogEntry]]) -> Iterator[LogEntry]:
    """The entries of all sources as they come, until each has ended. Raises what one of them raises."""
    queue: SimpleQueue[LogEntry | Exception | None] = SimpleQueue()

    def carry(source: Iterator[LogEntry]) -> None:
        try:
            for entry in source:
                queue.put(entry)
        except (OSError, ShimError) as error:
            queue.put(error)
        queue.put(None)

    threads = [threading.Thread(target=carry, args=(source,), daemon=True) for source in sources]
    for thread in threads:
        thread.start()
    running = len(threads)
    while running:
        got = queue.get()
        if isinstance(got, Exception):
            raise got
        if got is None:
            running -= 1
        else:
            yield got


def _whole_lines_bytes(path: str) -> int:
    """Bytes of the file's lines that have ended; 0 without a file."""
    at = 0
    with suppress(FileNotFoundError), open(path, "rb") as file:
        for line in file:
            at += len(line) if line.endswith(b"\n") else 0
    return at


def _lines(path: str, end: int | None = None) -> Iterator[str]:
    """The file's lines, up to `end` bytes. Raises OSError."""
    with open(path, "rb") as file:
        for line in file:
            if end is not None and file.tell() > end:
                return
            yield line.decode(errors="replace")


def _appended(path: str, at: int) -> Iterator[str]:
    """Lines that come after `at` bytes, for ever; a file that takes the place of this one is read from its start."""
    inode = 0
    while True:
        with suppress(FileNotFoundError), open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_size < at or (inode and status.st_ino != inode):
                at = 0
            inode = status.st_ino
            file.seek(at)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                at += len(line)
                yield line.decode(errors="replace")
        time.sleep(_LOOK_S)


class _Log(Struct, frozen=True, kw_only=True):
    """The runtime's log: the journal of its unit, a file, or stdin."""

    path: str | None
    unit: str
    found: str
    """The sandbox's id, for errors."""
    end: int | None
    """With --follow, the bytes of the file at the start."""

    def lines(self, *, since: str, until_s: int | None) -> Iterator[str]:
        """The existing lines. Raises OSError, FailedPrecondition when the journal cannot be read."""
        if self.path == "-":
            yield from sys.stdin
        elif self.path is not None:
            yield from _lines(self.path, self.end)
        else:
            bounds = [f"--since={since}"] if since else []
            bounds += [] if until_s is None else [f"--until=@{until_s}"]
            yield from _journal(self.unit or container_runtime().unit, self.found, *bounds)

    def coming(self, *, since_s: int) -> Iterator[str]:
        """Lines written from `since_s` on (seconds since the epoch), for ever."""
        if self.path is None:
            words = ("--follow", "--no-tail", f"--since=@{since_s}")
            yield from _journal(self.unit or container_runtime().unit, self.found, *words)
        elif self.path != "-":
            yield from _appended(self.path, self.end or 0)


def _journal(unit: str, found: str, *more: str) -> Iterator[str]:
    hint = "(hint: --file FILE reads another log)"
    argv = ["journalctl", "--unit", unit, "--output", "cat", "--no-pager", "--quiet", *more]
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


def console_entries(vm_dir: str, end: int | None = None) -> Iterator[LogEntry]:
    """The guest's lines in the shim's files, the newest up to `end` bytes. Empty once the VM is gone."""
    for name in _CONSOLE_FILES:
        with suppress(FileNotFoundError):
            yield from map(_console_entry, _lines(f"{vm_dir}/{name}", end if name == _CONSOLE_FILES[-1] else None))


def _console_entry(line: str) -> LogEntry:
    return LogEntry(source="console", time="", level="", message=line.rstrip("\r\n"), fields={})


def shim_entries(lines: Iterable[str], found: str, least: str = "debug") -> Iterator[LogEntry]:
    """The parsed lines with the sandbox's id in a field: the shim's, and the runtime's about the sandbox."""
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
        yield LogEntry(
            source="shim",
            time=fields.pop("time", ""),
            level=level,
            message=fields.pop("msg", ""),
            fields={name: value for name, value in fields.items() if (name, value) != ("sandbox", found)},
        )


def parsed(line: str) -> dict[str, str]:
    """The pairs of a line as logrus writes it. Text before the first, such as syslog's head, is skipped."""
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


def text_of(entry: LogEntry) -> str:
    """One line, without characters that would control a terminal."""
    words = [entry.time, f"{entry.level:<7}", entry.message] if entry.source == "shim" else ["console", entry.message]
    words += [f"{name}={value}" for name, value in entry.fields.items()]
    return "".join(character if character.isprintable() else " " for character in " ".join(words)).rstrip()
