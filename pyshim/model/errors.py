"""The shim's errors. Each class has the ttrpc status code with which a call fails.

Errors of the other rooms derive from these. The text is `verb object: cause`. The codes are those of google.rpc.Code,
which containerd maps to its own errors.
"""

import errno
from enum import IntEnum


class ErrorCode(IntEnum):
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class ShimError(Exception):
    """An error for the caller; `str(error)` is the text that the user reads."""

    code: ErrorCode = ErrorCode.INTERNAL


class Cancelled(ShimError):
    """Another call ended the work before it was complete."""

    code = ErrorCode.CANCELLED


class InvalidArgument(ShimError):
    code = ErrorCode.INVALID_ARGUMENT


class NotFound(ShimError):
    code = ErrorCode.NOT_FOUND


class AlreadyExists(ShimError):
    code = ErrorCode.ALREADY_EXISTS


class FailedPrecondition(ShimError):
    code = ErrorCode.FAILED_PRECONDITION


class Unavailable(ShimError):
    code = ErrorCode.UNAVAILABLE


class DeadlineExceeded(ShimError):
    code = ErrorCode.DEADLINE_EXCEEDED


class ResourceExhausted(ShimError):
    code = ErrorCode.RESOURCE_EXHAUSTED


class Unimplemented(ShimError):
    code = ErrorCode.UNIMPLEMENTED


class Internal(ShimError):
    code = ErrorCode.INTERNAL


_LIMITS = {
    errno.EAGAIN: "is the limit of processes, pids.max or LimitNPROC, reached?",
    errno.EMFILE: "is LimitNOFILE of the container runtime's unit too low?",
    errno.ENFILE: "is fs.file-max of the node reached?",
    errno.ENOMEM: "has the node, or the pod's cgroup, no memory left?",
    errno.ENOSPC: "is a disk, its inodes, or fs.inotify or fs.epoll.max_user_watches used up?",
    errno.EDQUOT: "is a quota of a disk used up?",
    errno.ENOLCK: "is the file system out of locks, or mounted without them?",
}
"""What an administrator looks at, by the error of a system call that met a limit."""


def declared(error: OSError, action: str) -> ShimError:
    """The error of a system call that nothing else has named: `action: EIO (input/output error): '/proc/1/stat'`."""
    kind = ResourceExhausted if error.errno in _LIMITS else Internal
    name = errno.errorcode.get(error.errno or 0, "EUNKNOWN")
    file = f": {error.filename!r}" if error.filename else ""
    hint = _LIMITS.get(error.errno or 0, "the shim's log has the place")
    return kind(f"{action}: {name} ({(error.strerror or str(error)).lower()}){file} (hint: {hint})")


class AgentGone(Unavailable):
    """The connection to the guest's agent ended; what the call did in the guest is not known."""
