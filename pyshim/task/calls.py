"""Serves the calls of containerd: decodes, answers, times and logs each, and turns an error into a status."""

import asyncio
import errno
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from pyshim.model.errors import ErrorCode, ShimError, declared
from pyshim.model.observation import Durations
from pyshim.ttrpc import CallContext, Handler, ImmediateHandler, TtrpcError, UnaryHandler

log = logging.getLogger(__name__)

# These only wait: the call ends when the caller's timeout has passed.
_WAITING_METHODS = frozenset({"Wait", "WaitSandbox"})
_KATA_NAMES = {"ResizePty": "resize_pty", "CloseIO": "close_io"}
"""Names of calls in Kata's metrics; those of the others are in lower case."""


class Method(NamedTuple):
    decode: Callable[[bytes], Any]
    """Its result has the `container_id` or the `sandbox_id` that the call is about."""
    act: Callable[[Any], Any]
    """Returns an awaitable, except for methods that only read memory."""
    encode: Callable[[Any], bytes]


class _OpenCall:
    """One call being served; the ids are known once it is decoded."""

    __slots__ = ("container_id", "exec_id", "method", "since_s")

    def __init__(self, method: str) -> None:
        self.method = method
        self.container_id = ""
        self.exec_id = ""
        self.since_s = time.monotonic()

    def is_about(self, request: Any) -> None:
        self.container_id = getattr(request, "sandbox_id", None) or request.container_id
        self.exec_id = getattr(request, "exec_id", None) or ""


class Calls:
    """The calls of all services of one shim."""

    def __init__(self, durations: Durations | None = None) -> None:
        """`durations` counts the calls under Kata's names for them."""
        self._durations = durations or Durations()
        self._open: set[_OpenCall] = set()
        self._last_call_s = time.monotonic()

    def handlers(self, methods: Mapping[str, Method], immediate: Mapping[str, Method]) -> Mapping[str, Handler]:
        """Handlers for a ttrpc server; the `immediate` methods only read memory and are answered at once."""
        handlers: dict[str, Handler] = {
            name: UnaryHandler(self._handler(name, method), cancel_on_timeout=name in _WAITING_METHODS)
            for name, method in methods.items()
        }
        handlers |= {name: ImmediateHandler(self._immediate(name, method)) for name, method in immediate.items()}
        return handlers

    def idle_s(self) -> float:
        """Seconds since the last call was answered, or this object was made; 0 while a call is open."""
        return 0.0 if self._open else time.monotonic() - self._last_call_s

    def open_calls(self) -> Iterator[str]:
        """One line per call that has not been answered yet."""
        now_s = time.monotonic()
        for call in sorted(self._open, key=lambda call: call.since_s):
            yield f"{call.method} {call.container_id} {call.exec_id or '-'} for {now_s - call.since_s:.1f} s"

    def _handler(self, name: str, method: Method) -> Callable[[bytes, CallContext], Awaitable[bytes]]:
        async def handle(payload: bytes, _: CallContext) -> bytes:
            with self._answering(name) as call:
                request = method.decode(payload)
                call.is_about(request)
                return method.encode(await method.act(request))

        return handle

    def _immediate(self, name: str, method: Method) -> Callable[[bytes, CallContext], bytes]:
        def handle(payload: bytes, _: CallContext) -> bytes:
            with self._answering(name) as call:
                request = method.decode(payload)
                call.is_about(request)
                return method.encode(method.act(request))

        return handle

    @contextmanager
    def _answering(self, name: str) -> Iterator[_OpenCall]:
        """Turns an error into a ttrpc status and logs the call."""
        call = _OpenCall(name)
        self._open.add(call)
        failure = ""
        try:
            yield call
        except asyncio.CancelledError:
            failure = "cancelled"
            raise
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
            raise status_of(error, name) from error
        finally:
            self._open.discard(call)
            self._last_call_s = time.monotonic()
            self._durations.took(_KATA_NAMES.get(name, name.lower()), time.monotonic() - call.since_s)
            _log_call(call, failure)


def _log_call(call: _OpenCall, failure: str) -> None:
    if not log.isEnabledFor(logging.DEBUG):
        return
    fields: dict[str, object] = {
        "method": call.method,
        "container": call.container_id,
        "exec": call.exec_id,
        "took_ms": round((time.monotonic() - call.since_s) * 1000),
        "error": failure,
    }
    log.debug("task call", extra={key: value for key, value in fields.items() if value != ""})


def status_of(error: Exception, method: str) -> TtrpcError:
    """A ShimError with its code and text; the error of a system call with its name; any other by the name of its type.

    Its traceback goes to the log only, since users see the status.
    """
    if isinstance(error, ShimError):
        return TtrpcError(error.code, str(error))
    if isinstance(error, TtrpcError):
        return error
    log.error("call failed unexpectedly", extra={"method": method}, exc_info=error)
    if isinstance(error, TimeoutError) and error.errno is None:
        return TtrpcError(ErrorCode.DEADLINE_EXCEEDED, f"serve {method}: a step took longer than its limit")
    if isinstance(error, MemoryError):
        error = OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    if isinstance(error, OSError):
        named = declared(error, f"serve {method}")
        return TtrpcError(named.code, str(named))
    return TtrpcError(ErrorCode.INTERNAL, f"serve {method}: {type(error).__name__} (hint: the shim's log has more)")
