"""The shim's log: lines in the form of containerd's own, into the FIFO that containerd copies to its log.

Rooms log with the stdlib: `log.info("vm started", extra={"pid": pid})`. The text is constant, facts are fields; values
of environment variables, tokens and other secrets are never fields.
"""

import json
import logging
import os
import time
from collections.abc import Mapping

LOG_FD = 2
_LEVELS = {"WARNING": "warning", "CRITICAL": "fatal"}
# Every attribute that logging itself gives a record; the others came by `extra`.
_OWN_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._/@^+")


def set_up(*, debug: bool, fd: int = LOG_FD, fields: Mapping[str, object] | None = None) -> None:
    """Every logger of the process writes to `fd`, each line with `fields`; Python's warnings go there too."""
    handler = FdHandler(fd)
    handler.setFormatter(LineFormatter(fields or {}))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    level = logging.DEBUG if debug else logging.INFO
    if root.level != level:  # a change writes to every logger, and so copies half a MiB of a zygote's memory
        root.setLevel(level)
    logging.captureWarnings(True)


def set_debug() -> None:
    """From now on every logger logs at debug level: the configuration, read after the set-up, asks for it."""
    logging.getLogger().setLevel(logging.DEBUG)


class FdHandler(logging.Handler):
    """Writes to a file descriptor without ever waiting for the reader: lines that do not fit are lost."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd
        self._torn = False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record) + "\n"
        except (TypeError, ValueError):
            # A bad log call must not fail the work it is about.
            self.handleError(record)
            return
        data = line.encode(errors="backslashreplace")
        if self._torn:
            data = b"\n" + data
        try:
            written = os.write(self._fd, data)
        except OSError:
            # The pipe is full or has no reader, and the log is the only place to report that.
            return
        # A long line can be cut by a nearly full pipe; the next one shall not be glued to its rest.
        self._torn = written < len(data)


class LineFormatter(logging.Formatter):
    """`time="…" level=info msg="…" key=value …`, one line per record whatever its values hold."""

    def __init__(self, fields: Mapping[str, object]) -> None:
        super().__init__()
        self._fields = dict(fields)

    def format(self, record: logging.LogRecord) -> str:
        level = _LEVELS.get(record.levelname, record.levelname.lower())
        words = [f'time="{_moment(record.created)}"', f"level={level}", f"msg={_quoted(record.getMessage(), True)}"]
        extra = {key: value for key, value in vars(record).items() if key not in _OWN_ATTRIBUTES}
        for key, value in {**self._fields, **extra, "logger": record.name}.items():
            words.append(f"{key}={_quoted(value)}")
        if record.exc_info and record.exc_info[0] is not None:
            words.append(f"traceback={_quoted(self.formatException(record.exc_info))}")
        if record.stack_info:
            words.append(f"stack={_quoted(record.stack_info)}")
        return " ".join(words)


def _moment(created_s: float) -> str:
    whole_s = int(created_s)
    nanoseconds = int((created_s - whole_s) * 1e9)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(whole_s))}.{nanoseconds:09d}Z"


def _quoted(value: object, always: bool = False) -> str:
    """As logrus does it: bare when every character is harmless, else in double quotes with escapes."""
    text = str(value)
    if text and not always and _PLAIN.issuperset(text):
        return text
    return json.dumps(text, ensure_ascii=False)
