"""Log lines on stderr (the VM's console): `time= level= msg= key=value`.

A console write costs host time on an emulated serial port, so only state changes are logged at the default level.
"""

from __future__ import annotations

import os
import time

_LEVELS = {"trace": 0, "debug": 1, "info": 2, "warn": 3, "warning": 3, "error": 4, "critical": 4}
_threshold = 2


def set_level(name: str) -> None:
    """Lines below level `name` are dropped from now on; an unknown name changes nothing."""
    global _threshold
    _threshold = _LEVELS.get(name, _threshold)


def _quoted(value: object) -> str:
    text = str(value)
    if text and text.isprintable() and not any(c in ' ="\\' for c in text):
        return text
    if not (text.isascii() and text.isprintable()) or "\\" in text:
        text = text.encode("unicode_escape").decode()
    return '"' + text.replace('"', '\\"') + '"'


def _emit(level: str, message: str, fields: dict[str, object]) -> None:
    pairs = "".join(f" {key}={_quoted(value)}" for key, value in fields.items())
    now = str(time.time_ns())  # as text and not as a float: formatting one is much code for a guest's first second
    line = f"agent time={now[:-9]}.{now[-9:-6]} level={level} msg={_quoted(message)}{pairs}\n"
    try:
        os.write(2, line[:4096].encode("utf-8", "replace"))
    except OSError:
        pass  # a console that is gone or full must not take the sandbox with it


def debug(message: str, **fields: object) -> None:
    if _threshold <= 1:
        _emit("debug", message, fields)


def info(message: str, **fields: object) -> None:
    if _threshold <= 2:
        _emit("info", message, fields)


def warning(message: str, **fields: object) -> None:
    if _threshold <= 3:
        _emit("warning", message, fields)


def error(message: str, **fields: object) -> None:
    _emit("error", message, fields)
