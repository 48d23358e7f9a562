"""Configurations that were read before: a zygote reads each once, and all its forks have it."""

import os
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from pyshim.config.effective import KNOWN_PLACES, Effective, examine
from pyshim.config.sources import read_files, read_source, source_files
from pyshim.host.file_answers import file_identity, is_settled
from pyshim.model.task import RuntimeOptions

MAX_KEPT = 16
"""Configurations, as many as a node has handlers; beyond that it is a client that names a new file each time."""


class _Look(NamedTuple):
    """What a configuration depends on: as long as it is the same, so is what `examine` makes of it."""

    files: tuple[tuple[str, str], ...]
    """Path and identity."""
    programs: tuple[str, ...]
    """Those of `KNOWN_PLACES` that are there."""


class Examined:
    def __init__(self, *, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._clock_ns = clock_ns
        self._kept: dict[str, tuple[_Look, Effective]] = {}
        """By the main file."""

    def of(self, options: RuntimeOptions | None, environment: Mapping[str, str]) -> Effective:
        """The configuration before a pod's annotations. Its files are read when they are others than before.

        Raises InvalidArgument or FailedPrecondition naming the file.
        """
        files = source_files(options, environment)
        if not files:
            return examine(read_source(options, environment))
        look, _ = self._look(files)
        if files[0] in self._kept and self._kept[files[0]][0] == look:
            return self._kept[files[0]][1]
        effective = examine(read_files(files))
        if (look, True) == self._look(files):
            if len(self._kept) == MAX_KEPT:
                self._kept.clear()
            self._kept[files[0]] = (look, effective)
        return effective

    def _look(self, files: tuple[str, ...]) -> tuple[_Look, bool]:
        """The second value: each later change of a file gives another `_Look`."""
        found: list[tuple[str, str]] = []
        settled, now_ns = True, self._clock_ns()
        for file in files:
            try:
                status = os.stat(file)
            except OSError:
                settled = False  # who reads it says why
                continue
            found.append((file, file_identity(status)))
            settled = settled and is_settled(status, now_ns)
        programs = tuple(path for places in KNOWN_PLACES.values() for path in places if os.access(path, os.X_OK))
        return _Look(tuple(found), programs), settled
