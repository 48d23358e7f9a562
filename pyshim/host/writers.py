"""Finds users other than root that can change files which root executes or boots, or directories above them.

Looks at owner and mode, not at access control lists. Our own user counts as root: tests and checks run unprivileged.
"""

import os
import stat
import sys
from collections import deque
from collections.abc import Iterable, Iterator

_MAX_LINKS = 40
"""As many symbolic links as the kernel follows in one path (path_resolution(7))."""
_EVERYONE, _GROUP = stat.S_IWOTH, stat.S_IWGRP


def code_paths() -> tuple[str, ...]:
    """The interpreter, and every directory that this process imports from."""
    return (sys.executable, *(path for path in sys.path if os.path.isabs(path)))


def writable_by_others(paths: Iterable[str]) -> tuple[str, ...]:
    """Each place on the way to one of `paths`, links followed, that others can write: `'/x' by group 100`.

    Paths that do not exist are skipped.
    """
    seen: dict[str, str] = {}
    for path in paths:
        for place, found in _places(path):
            if place not in seen:
                seen[place] = _writer(found)
    return tuple(f"'{place}' by {writer}" for place, writer in seen.items() if writer)


def writable_below(directories: Iterable[str]) -> tuple[str, ...]:
    """Each file and directory below `directories` that others can write, links not followed."""
    written: list[str] = []
    for directory in directories:
        for above, names, files in os.walk(directory):
            for name in (*names, *files):
                path = os.path.join(above, name)
                try:
                    writer = _writer(os.lstat(path))
                except FileNotFoundError:
                    continue
                if writer:
                    written.append(f"'{path}' by {writer}")
    return tuple(written)


def _places(path: str) -> Iterator[tuple[str, os.stat_result]]:
    """Every directory, link and file on the way to `path`, from the root on."""
    yield "/", os.lstat("/")
    here, links = "/", 0
    rest = deque(name for name in os.path.abspath(path).split("/") if name)
    while rest:
        name = rest.popleft()
        if name == "..":
            here = os.path.dirname(here)
            continue
        place = os.path.join(here, name)
        try:
            found = os.lstat(place)
            target = os.readlink(place) if stat.S_ISLNK(found.st_mode) else ""
        except OSError:
            return
        yield place, found
        if not target:
            here = place
            continue
        links += 1
        if links > _MAX_LINKS:
            return
        here = "/" if target.startswith("/") else here
        rest.extendleft(reversed([part for part in target.split("/") if part not in ("", ".")]))


def _writer(found: os.stat_result) -> str:
    """The others beside root that can write this; empty if none can."""
    if found.st_uid not in (0, os.geteuid()):
        return f"its owner, user {found.st_uid}"
    if stat.S_ISLNK(found.st_mode):
        return ""  # a link's mode has no meaning; its directory is checked
    if found.st_mode & stat.S_ISVTX and stat.S_ISDIR(found.st_mode):
        return ""  # such as /tmp: what root has there only root can replace
    if found.st_mode & _EVERYONE:
        return "everyone"
    if found.st_mode & _GROUP and found.st_gid:
        return f"group {found.st_gid}"
    return ""
