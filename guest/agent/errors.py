"""Errors that become a ttrpc status. Any other exception becomes INTERNAL with its type name."""

from __future__ import annotations

import errno

from pyshim.ttrpc.status import Code


class AgentError(Exception):
    """A request failed; `code` is the status the caller sees, the text is `verb object: cause`."""

    code = Code.INTERNAL


class InvalidArgument(AgentError):
    code = Code.INVALID_ARGUMENT


class DeadlineExceeded(AgentError):
    code = Code.DEADLINE_EXCEEDED


class NotFound(AgentError):
    code = Code.NOT_FOUND


class AlreadyExists(AgentError):
    code = Code.ALREADY_EXISTS


class FailedPrecondition(AgentError):
    code = Code.FAILED_PRECONDITION


class Unimplemented(AgentError):
    code = Code.UNIMPLEMENTED


class Unavailable(AgentError):
    code = Code.UNAVAILABLE


class Internal(AgentError):
    code = Code.INTERNAL


def os_cause(error: OSError) -> str:
    """`ENOENT (no such file or directory)`: the errno's name and text."""
    name = errno.errorcode.get(error.errno or 0, "EUNKNOWN")
    return f"{name} ({(error.strerror or '').lower()})"
