"""Facts about files, such as their hashes, stored below /run for later shims, which would compute them again.

An answer is stored by the file's identity: device, inode, size, times of change. A changed file has another identity.
"""

import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress

from pyshim.host.files import replace_file

log = logging.getLogger(__name__)

MAX_ANSWERS = 64
_MAX_ANSWER_CHARS = 1024
_SETTLED_NS = 2_000_000_000
"""A file changed more recently may change again within one tick of its clock: answers about it are not stored."""


def file_identity(status: os.stat_result) -> str:
    parts = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return "-".join(map(str, parts))


def is_settled(status: os.stat_result, now_ns: int) -> bool:
    """A later change of the file gives it another identity."""
    return now_ns - max(status.st_mtime_ns, status.st_ctime_ns) > _SETTLED_NS


class FileAnswers:
    """The answers in a directory, a file for each; the oldest go."""

    def __init__(self, directory: str, *, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._directory = directory
        self._clock_ns = clock_ns

    def stored(self, status: os.stat_result) -> str:
        """The answer about this file; empty if there is none, or if other users could have written it."""
        with suppress(OSError, ValueError):
            directory = os.lstat(self._directory)
            if directory.st_uid == os.geteuid() and not directory.st_mode & 0o022:
                with open(self._path(status), encoding="utf-8") as file:
                    return file.read(_MAX_ANSWER_CHARS)
        return ""

    def store(self, status: os.stat_result, answer: str) -> None:
        """The next process finds the answer, unless it cannot be stored."""
        if not is_settled(status, self._clock_ns()):
            return
        try:
            os.makedirs(self._directory, mode=0o700, exist_ok=True)
            replace_file(self._path(status), answer.encode("ascii"), mode=0o600, durable=False, many_writers=True)
            for entry in self._oldest():
                with suppress(FileNotFoundError):
                    os.unlink(entry)
        except OSError as error:
            log.warning("answer not stored", extra={"directory": self._directory, "error": str(error)})

    def _path(self, status: os.stat_result) -> str:
        return f"{self._directory}/{file_identity(status)}"

    def _oldest(self) -> list[str]:
        entries = sorted(os.scandir(self._directory), key=lambda entry: entry.stat().st_mtime_ns)
        return [entry.path for entry in entries[: max(0, len(entries) - MAX_ANSWERS)]]
