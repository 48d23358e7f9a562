"""Errors that become a ttrpc status. Any other exception becomes INTERNAL with its type name."""

from __future__ import annotations

# Those that the birth of a container asks about: the module `errno` makes all of the kernel's, which takes longer.
# Source of the numbers: the kernel's include/uapi/asm-generic/errno-base.h.
ENOENT, EIO, ENODEV, EINVAL, EPIPE = 2, 5, 19, 22, 32


class AgentError(Exception):
    """A request failed; `code` is the google.rpc code the caller sees, the text is `verb object: cause`."""

    code = 13


class InvalidArgument(AgentError):
    code = 3


class DeadlineExceeded(AgentError):
    code = 4


class NotFound(AgentError):
    code = 5


class AlreadyExists(AgentError):
    code = 6


class ResourceExhausted(AgentError):
    code = 8


class FailedPrecondition(AgentError):
    code = 9


class Unimplemented(AgentError):
    code = 12


class Internal(AgentError):
    code = 13


def os_cause(error: OSError) -> str:
    """`ENOENT (no such file or directory)`: the errno's name and text."""
    import errno

    name = errno.errorcode.get(error.errno or 0, "EUNKNOWN")
    return f"{name} ({(error.strerror or '').lower()})"
