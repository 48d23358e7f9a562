"""Lines of a sandbox's shim in the container runtime's log, parsed; and entries as text. Pure."""

import re
from collections.abc import Iterable, Iterator

from msgspec import Struct

LEVELS = ("debug", "info", "warning", "error", "fatal")
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
