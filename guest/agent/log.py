"""The agent's log: lines on stderr, the VM's console, of the form `agent time= level= msg= key=value`.

A console write costs host time on an emulated serial port, so only state changes are logged at the default level.
Modules log with the standard library: `log.info("vm started", extra={"pid": pid})`.
"""

from __future__ import annotations

import logging
import os

_LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}
# Of a line, with its end; the rest is cut, as people read the console.
_MAX_LINE_CHARS = 4096
# Attributes that logging itself sets; all others came by `extra`.
_OWN_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def set_up(level: str = "info") -> None:
    """All loggers of the process write to stderr from `level` on; an unknown level is `info`."""
    handler = ConsoleHandler()
    handler.setFormatter(LineFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(_LEVELS.get(level, logging.INFO))


class ConsoleHandler(logging.Handler):
    """One write(2) to stderr for each line. A line that stderr does not take is lost: a console that is gone or full
    must not end the sandbox.
    """

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)[: _MAX_LINE_CHARS - 1] + "\n"
            os.write(2, line.encode("utf-8", "replace"))
        except OSError:
            pass
        except Exception:
            self.handleError(record)


class LineFormatter(logging.Formatter):
    """`agent time=1700000000.042 level=info msg="a b" key=value`, one line whatever the values hold."""

    def format(self, record: logging.LogRecord) -> str:
        level = record.levelname.lower()
        words = [f"agent time={record.created:.3f} level={level} msg={_quoted(record.getMessage())}"]
        words += [f"{key}={_quoted(value)}" for key, value in vars(record).items() if key not in _OWN_ATTRIBUTES]
        if record.exc_info and record.exc_info[0] is not None:
            words.append(f"traceback={_quoted(self.formatException(record.exc_info))}")
        return " ".join(words)


def _quoted(value: object) -> str:
    text = str(value)
    if text and text.isprintable() and not any(character in ' ="\\' for character in text):
        return text
    if not (text.isascii() and text.isprintable()) or "\\" in text:
        text = text.encode("unicode_escape").decode()
    return '"' + text.replace('"', '\\"') + '"'
