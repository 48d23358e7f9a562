"""What went wrong, as the caller gets it: a ttrpc status. The one place where that is decided."""

import logging

from pyshim.model.errors import ErrorCode, ShimError
from pyshim.ttrpc import TtrpcError

log = logging.getLogger("pyshim.task")


def status_of(error: Exception, method: str) -> TtrpcError:
    """`error` with its code and its own words; what nobody foresaw becomes INTERNAL with only its type named.

    The latter's traceback goes to the log: on the wire it would end up in front of a user, with whatever it quotes.
    """
    if isinstance(error, ShimError):
        return TtrpcError(error.code, str(error))
    if isinstance(error, TtrpcError):
        return error
    log.error("call failed unexpectedly", extra={"method": method}, exc_info=error)
    if isinstance(error, TimeoutError):
        return TtrpcError(ErrorCode.DEADLINE_EXCEEDED, f"serve {method}: a step took longer than its limit")
    return TtrpcError(ErrorCode.INTERNAL, f"serve {method}: {type(error).__name__} (hint: the shim's log has more)")
