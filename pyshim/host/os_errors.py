"""Errors of system calls as ShimErrors."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from pyshim.model.errors import FailedPrecondition, ShimError


def describe_os_error(error: OSError) -> str:
    """`ENOENT (no such file or directory)`."""
    name = errno.errorcode.get(error.errno or 0, "EUNKNOWN")
    return f"{name} ({(error.strerror or str(error)).lower()})"


@contextmanager
def os_errors(action: str, kind: type[ShimError] = FailedPrecondition, *, hint: str = "") -> Iterator[None]:
    """An OSError becomes a `kind`: `action: cause (hint: hint)`."""
    try:
        yield
    except OSError as error:
        raise kind(f"{action}: {describe_os_error(error)}" + (f" (hint: {hint})" if hint else "")) from error
