"""The one error of containerd's foreground calls, and how an OSError reads in it.

Apart from pyshim.model.errors because that tree needs `enum`, which costs `start` more than all of its own code.
"""

import errno
import posix


class BootstrapError(Exception):
    """A foreground call failed; `str(error)` is the one line containerd shows: `verb object: cause`."""


def os_failure(action: str, target: str, error: OSError) -> BootstrapError:
    """`error`, met on `target`, in the words of the project: the errno's name first, then its text."""
    number = error.errno or 0
    name = errno.errorcode.get(number, str(number))
    return BootstrapError(f"{action} {target!r}: {name} ({posix.strerror(number).lower()})")
