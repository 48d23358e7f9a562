"""The shim's log: lines in the form of containerd's own, into the FIFO that containerd copies to its log.

Rooms log with the stdlib: `log.info("vm started", extra={"pid": pid})`. The text is constant, facts are fields; values
of environment variables, tokens and other secrets are never fields.
"""

import json
import logging
import os
import time
from collections.abc import Mapping
from typing import Any

LOG_FD = 2
_LEVELS = {"WARNING": "warning", "CRITICAL": "fatal"}
# The attributes that logging sets on every record; others come from `extra`.
_OWN_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._/@^+")


def set_up(*, debug: bool, fd: int = LOG_FD, fields: Mapping[str, object] | None = None) -> None:
    """Every logger of the process writes to `fd`, each line with `fields`; Python's warnings go there too."""
    handler = FdHandler(fd)
    handler.setFormatter(LineFormatter(fields or {}))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    level = logging.DEBUG if debug else logging.INFO
    if root.level != level:  # a change writes to every logger: half a MiB in a fork of the zygote
        root.setLevel(level)
    logging.captureWarnings(True)


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """The facts that the caller gave in `extra`."""
    return {name: value for name, value in vars(record).items() if name not in _OWN_ATTRIBUTES}


def set_debug() -> None:
    """Every logger logs at debug level from now on. The configuration that enables it is read after `set_up`."""
    logging.getLogger().setLevel(logging.DEBUG)


class FdHandler(logging.Handler):
    """Writes to a file descriptor and never waits for the reader: lines that do not fit are lost."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd
        self._torn = False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record) + "\n"
        except (TypeError, ValueError):
            # A wrong log call must not fail its caller.
            self.handleError(record)
            return
        except MemoryError:  # so must not one for which there is no room
            return
        data = line.encode(errors="backslashreplace")
        if self._torn:
            data = b"\n" + data
        try:
            written = os.write(self._fd, data)
        except OSError:
            # The pipe is full or has no reader, and only the log could report that.
            return
        # A nearly full pipe can cut a long line; then the next one begins with a line break.
        self._torn = written < len(data)


class LineFormatter(logging.Formatter):
    """`time="…" level=info msg="…" key=value …`, one line for each record, whatever its values."""

    def __init__(self, fields: Mapping[str, object]) -> None:
        super().__init__()
        self._fields = dict(fields)

    def format(self, record: logging.LogRecord) -> str:
        level = _LEVELS.get(record.levelname, record.levelname.lower())
        words = [f'time="{_moment(record.created)}"', f"level={level}", f"msg={_quoted(record.getMessage(), True)}"]
        extra = fields_of(record)
        for key, value in {**self._fields, **extra, "logger": record.name}.items():
            words.append(f"{key}={_quoted(value)}")
        if record.exc_info and record.exc_info[0] is not None:
            words.append(f"traceback={_quoted(self.formatException(record.exc_info))}")
        if record.stack_info:
            words.append(f"stack={_quoted(record.stack_info)}")
        return " ".join(words)

    def formatException(self, ei: Any) -> str:
        """The traceback, or the error's name where there is no memory for more."""
        try:
            return super().formatException(ei)
        except (MemoryError, SystemError):  # since 3.13 it parses the source, which then fails by either
            return ei[0].__name__  # type: ignore[no-any-return]


def _moment(created_s: float) -> str:
    whole_s = int(created_s)
    nanoseconds = int((created_s - whole_s) * 1e9)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(whole_s))}.{nanoseconds:09d}Z"


def _quoted(value: object, always: bool = False) -> str:
    """In logrus' form: bare if every character is plain, else in double quotes with escapes."""
    text = str(value)
    if text and not always and _PLAIN.issuperset(text):
        return text
    return json.dumps(text, ensure_ascii=False)
