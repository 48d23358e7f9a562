"""Files that are replaced whole: whoever reads one finds what it held or what it holds now, never a part."""

import contextlib
import os

ASIDE = "~"
"""The end of the name of what is written aside, which begins with a dot."""


def replace_file(path: str, content: bytes, *, mode: int, durable: bool, many_writers: bool = False) -> None:
    """The file holds `content` and has exactly `mode`; when this raises, it is as it was. Raises OSError.

    `durable`: after a power cut, too, it holds the one or the other; without, it may be empty then, which is enough for
    what a reboot loses anyway or anybody can make again. `many_writers`: other processes may replace it at the same
    time. Each then writes aside under a name of its own, which stays when it is killed meanwhile.
    """
    directory, name = os.path.split(path)
    aside = f"{directory}/.{name}{f'.{os.getpid()}' if many_writers else ''}{ASIDE}"
    fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        try:
            os.fchmod(fd, mode)
            view = memoryview(content)
            while view:
                view = view[os.write(fd, view) :]
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(aside)
        raise
