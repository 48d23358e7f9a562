"""Failures on demand: a file of faults, looked at by every call.

A fault is `METHOD:MOMENT=ACTION`, several are separated by commas or lines. MOMENT is `before` (nothing of the call has
been done) or `after` (all of it has). ACTION is one of

    error(TEXT)  the call fails with this text
    delay(S)     it takes S seconds more
    hang         it is never answered
    drop         its connection is closed instead of an answer
    twice        it is answered twice
    empty        it is answered with an empty message: from CreateVM an empty socket path
    die          the peer is gone, as by kill -9

A fault strikes every call until the file says something else.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

METHODS = ("Version", "CreateVM", "StartVM", "StopVM")
_FAULT = re.compile(r"(?P<method>\w+):(?P<moment>before|after)=(?P<action>\w+)(?:\((?P<argument>[^)]*)\))?")


class Action(StrEnum):
    ERROR = "error"
    DELAY = "delay"
    HANG = "hang"
    DROP = "drop"
    TWICE = "twice"
    EMPTY = "empty"
    DIE = "die"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    method: str
    moment: str
    action: Action
    argument: str = ""


def parse(text: str) -> tuple[Fault, ...]:
    """The faults `text` spells. ValueError names a word that does not."""
    return tuple(_parsed(word.strip()) for word in re.split(r"[,\n]", text) if word.strip())


def _parsed(word: str) -> Fault:
    found = _FAULT.fullmatch(word)
    if found is None or found["method"] not in METHODS or found["action"] not in set(Action):
        raise ValueError(
            f"read fault {word!r}: want METHOD:before|after=ACTION (python -m integration.remote fault --help)"
        )
    argument = found["argument"] or ""
    if found["action"] == Action.DELAY:
        float(argument)
    return Fault(method=found["method"], moment=found["moment"], action=Action(found["action"]), argument=argument)


class Faults:
    """The faults in the file `path`; none when there is no file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def at(self, method: str, moment: str) -> tuple[Fault, ...]:
        try:
            text = self._path.read_text()
        except FileNotFoundError:
            return ()
        return tuple(fault for fault in parse(text) if (fault.method, fault.moment) == (method, moment))

    def write(self, text: str) -> None:
        """From now on `text` holds; empty for no faults. ValueError as `parse`."""
        if not parse(text):
            self._path.unlink(missing_ok=True)
            return
        fresh = self._path.with_suffix(".new")
        fresh.write_text(text)
        fresh.rename(self._path)
