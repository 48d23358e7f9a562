"""Keeps configurations that were read before: a zygote reads each file once, for all its forks."""

import os
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from pyshim.config.effective import PROGRAM_PATHS, Effective, examine
from pyshim.config.sources import read_files, read_source, source_files
from pyshim.host.file_answers import file_identity, is_settled
from pyshim.model.task import RuntimeOptions

MAX_CONFIGS = 16
"""More than the handlers of a node have. A client that names a new file each time only makes the cache start again."""


class _Inputs(NamedTuple):
    """What a configuration is computed from, besides its text: equal inputs give an equal configuration."""

    files: tuple[tuple[str, str], ...]
    """The path and identity of each file."""
    programs: tuple[str, ...]
    """The paths of PROGRAM_PATHS that exist."""


class ConfigCache:
    def __init__(self, *, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._clock_ns = clock_ns
        self._entries: dict[str, tuple[_Inputs, Effective]] = {}
        """By the path of the main file."""

    def get(self, options: RuntimeOptions | None, environment: Mapping[str, str]) -> Effective:
        """The configuration before a pod's annotations. Its files are read again only after a change.

        Raises InvalidArgument or FailedPrecondition naming the file.
        """
        files = source_files(options, environment)
        if not files:
            return examine(read_source(options, environment))
        inputs, _ = self._inputs(files)
        if files[0] in self._entries and self._entries[files[0]][0] == inputs:
            return self._entries[files[0]][1]
        effective = examine(read_files(files))
        if (inputs, True) == self._inputs(files):
            if len(self._entries) == MAX_CONFIGS:
                self._entries.clear()
            self._entries[files[0]] = (inputs, effective)
        return effective

    def _inputs(self, files: tuple[str, ...]) -> tuple[_Inputs, bool]:
        """The present inputs, and whether every later change of a file will change them."""
        found: list[tuple[str, str]] = []
        settled, now_ns = True, self._clock_ns()
        for file in files:
            try:
                status = os.stat(file)
            except OSError:
                settled = False  # `read_files` reports the error
                continue
            found.append((file, file_identity(status)))
            settled = settled and is_settled(status, now_ns)
        programs = tuple(path for paths in PROGRAM_PATHS.values() for path in paths if os.access(path, os.X_OK))
        return _Inputs(tuple(found), programs), settled
