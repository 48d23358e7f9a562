"""containerd's Task API, generations 2 and 3: every method is decode, ask the sandboxes, encode."""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from pyshim.model.durations import Durations
from pyshim.model.errors import ErrorCode, ShimError, Unimplemented
from pyshim.model.host_facts import CgroupMode
from pyshim.model.ids import ContainerId, ExecId
from pyshim.model.stats import ContainerStats
from pyshim.model.task import CreateTask, ExecTask, ExitStatus, ProcessInfo, ProcessState
from pyshim.task import translate, translate_stats
from pyshim.ttrpc import CallContext, Handler, ImmediateHandler, TtrpcError, UnaryHandler

log = logging.getLogger(__name__)

SERVICES = ("containerd.task.v2.Task", "containerd.task.v3.Task")
# These only wait: the call ends when the caller's timeout has passed.
_WAITING_METHODS = frozenset({"Wait"})
_KATA_NAMES = {"ResizePty": "resize_pty", "CloseIO": "close_io"}
"""Names of calls in Kata's metrics; those of the others are in lower case."""


class SandboxRpc(Protocol):
    """The Task API in model values. `exec_id` None means the init process. Every call raises ShimError.

    Calls come in any order and at the same time. Callers that gave up repeat them. A call ends with its work done or
    undone even when its caller has gone, since ttrpc cannot cancel.
    """

    async def create(self, request: CreateTask) -> int:
        """The task's pid: stable until delete, and the same from `connect`."""

    async def start(self, container_id: ContainerId, exec_id: ExecId | None) -> int: ...
    def state(self, container_id: ContainerId, exec_id: ExecId | None) -> ProcessState:
        """As it is now (containerd gives it two seconds, and asks seven times for each exec)."""

    def pids(self, container_id: ContainerId) -> tuple[ProcessInfo, ...]:
        """At least the init process, for containerd takes an empty list for a leaked task."""

    async def pause(self, container_id: ContainerId) -> None: ...
    async def resume(self, container_id: ContainerId) -> None: ...
    async def kill(
        self, container_id: ContainerId, exec_id: ExecId | None, signal: int, all_processes: bool
    ) -> None: ...
    async def exec(self, request: ExecTask) -> None: ...
    async def resize_pty(self, container_id: ContainerId, exec_id: ExecId | None, width: int, height: int) -> None: ...
    async def close_io(self, container_id: ContainerId, exec_id: ExecId | None) -> None: ...
    async def update(
        self, container_id: ContainerId, resources: Mapping[str, Any], annotations: Mapping[str, str]
    ) -> None: ...
    async def wait(self, container_id: ContainerId, exec_id: ExecId | None) -> ExitStatus:
        """Once it has ended; may be cancelled, and then nothing has changed."""

    async def stats(self, container_id: ContainerId) -> ContainerStats: ...
    def connect(self, container_id: ContainerId) -> int:
        """The task's pid; 0 when the container is not known."""

    async def delete(self, container_id: ContainerId, exec_id: ExecId | None) -> tuple[int, ExitStatus]: ...
    async def shutdown(self, now: bool) -> bool:
        """True when nothing is left and this process may end; False, without effect, while there is a container."""


class _Method(NamedTuple):
    decode: Callable[[bytes], Any]
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
        self.container_id = request.container_id
        self.exec_id = getattr(request, "exec_id", None) or ""


class TaskService:
    """The Task API over `sandboxes`. `finished` is set once containerd's Shutdown found nothing left to serve."""

    def __init__(self, *, sandboxes: SandboxRpc, cgroup_mode: CgroupMode, durations: Durations | None = None) -> None:
        """`cgroup_mode` is the host's: containerd's metrics collector expects statistics in its form.

        `durations` counts the calls under Kata's names for them.
        """
        self._durations = durations or Durations()
        self.finished = asyncio.Event()
        self._sandboxes = sandboxes
        self._cgroup_mode = cgroup_mode
        self._open: set[_OpenCall] = set()
        self._last_call_s = time.monotonic()

    def services(self) -> Mapping[str, Mapping[str, Handler]]:
        """Handlers for a ttrpc server, the same under both service names."""
        handlers: dict[str, Handler] = {
            name: UnaryHandler(self._handler(name, method), cancel_on_timeout=name in _WAITING_METHODS)
            for name, method in self._methods().items()
        }
        handlers |= {
            name: ImmediateHandler(self._immediate(name, method)) for name, method in self._immediate_methods().items()
        }
        return dict.fromkeys(SERVICES, handlers)

    def idle_s(self) -> float:
        """Seconds since the last call was answered, or this object was made; 0 while a call is open."""
        return 0.0 if self._open else time.monotonic() - self._last_call_s

    def open_calls(self) -> Iterator[str]:
        """One line per call that has not been answered yet."""
        now_s = time.monotonic()
        for call in sorted(self._open, key=lambda call: call.since_s):
            yield f"{call.method} {call.container_id} {call.exec_id or '-'} for {now_s - call.since_s:.1f} s"

    def _methods(self) -> dict[str, _Method]:
        rpc = self._sandboxes
        return {
            "Create": _Method(translate.create_request, rpc.create, translate.create_reply),
            "Start": _Method(translate.process_ref, lambda r: rpc.start(*r), translate.start_reply),
            "Pause": _Method(translate.task_ref, lambda r: rpc.pause(*r), translate.empty_reply),
            "Resume": _Method(translate.task_ref, lambda r: rpc.resume(*r), translate.empty_reply),
            "Kill": _Method(translate.kill_request, lambda r: rpc.kill(*r), translate.empty_reply),
            "Exec": _Method(translate.exec_request, rpc.exec, translate.empty_reply),
            "ResizePty": _Method(translate.resize_request, lambda r: rpc.resize_pty(*r), translate.empty_reply),
            # The flag `stdin` is ignored, as runc's shim does: clients rely on it.
            "CloseIO": _Method(translate.process_ref, lambda r: rpc.close_io(*r), translate.empty_reply),
            "Update": _Method(translate.update_request, lambda r: rpc.update(*r), translate.empty_reply),
            "Wait": _Method(translate.process_ref, lambda r: rpc.wait(*r), translate.wait_reply),
            "Stats": _Method(translate.task_ref, lambda r: rpc.stats(*r), self._stats_reply),
            "Delete": _Method(translate.process_ref, lambda r: rpc.delete(*r), translate.delete_reply),
            "Shutdown": _Method(translate.shutdown_request, self._shutdown, translate.empty_reply),
            "Checkpoint": _Method(translate.task_ref, _checkpoint, translate.empty_reply),
        }

    def _immediate_methods(self) -> dict[str, _Method]:
        """The methods that only read memory: they are answered at once."""
        rpc = self._sandboxes
        return {
            "State": _Method(translate.process_ref, lambda r: rpc.state(*r), translate.state_reply),
            "Pids": _Method(translate.task_ref, lambda r: rpc.pids(*r), translate.pids_reply),
            "Connect": _Method(translate.connect_request, lambda r: rpc.connect(*r), _connect_reply),
        }

    def _handler(self, name: str, method: _Method) -> Callable[[bytes, CallContext], Awaitable[bytes]]:
        async def handle(payload: bytes, _: CallContext) -> bytes:
            with self._answering(name) as call:
                request = method.decode(payload)
                call.is_about(request)
                return method.encode(await method.act(request))

        return handle

    def _immediate(self, name: str, method: _Method) -> Callable[[bytes, CallContext], bytes]:
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

    async def _shutdown(self, request: translate.ShutdownRequest) -> None:
        if await self._sandboxes.shutdown(request.now):
            self.finished.set()

    def _stats_reply(self, stats: ContainerStats) -> bytes:
        return translate.stats_reply(translate_stats.metrics(stats, self._cgroup_mode))


def _connect_reply(task_pid: int) -> bytes:
    return translate.connect_reply(os.getpid(), task_pid)


async def _checkpoint(request: translate.TaskRef) -> None:
    raise Unimplemented(f"checkpoint task {request.container_id!r}: not supported for virtual machines")


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
    """`error` with its code and its text; any other exception becomes INTERNAL with only its type named.

    The traceback of such an exception goes to the log only: users see what is on the wire.
    """
    if isinstance(error, ShimError):
        return TtrpcError(error.code, str(error))
    if isinstance(error, TtrpcError):
        return error
    log.error("call failed unexpectedly", extra={"method": method}, exc_info=error)
    if isinstance(error, TimeoutError):
        return TtrpcError(ErrorCode.DEADLINE_EXCEEDED, f"serve {method}: a step took longer than its limit")
    return TtrpcError(ErrorCode.INTERNAL, f"serve {method}: {type(error).__name__} (hint: the shim's log has more)")
