"""The one error of the calls in containerd's foreground, and its text for an OSError.

Apart from pyshim.model.errors because that tree needs `enum`, which costs `start` more than all of its own code.
"""

import errno
import os


class BootstrapError(Exception):
    """A foreground call failed; `str(error)` is the one line containerd shows: `verb object: cause`."""


def os_failure(action: str, target: str, error: OSError) -> BootstrapError:
    """The error that `action` on `target` met, as `verb object: cause`: the errno's name, then its text."""
    number = error.errno or 0
    name = errno.errorcode.get(number, str(number))
    return BootstrapError(f"{action} {target!r}: {name} ({os.strerror(number).lower()})")
