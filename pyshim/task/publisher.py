"""Sends events to containerd: one queue and one sender, in the order in which they happened.

Calls never wait for containerd, which may be restarting: `publish` only queues. The sender repeats the first event,
with pauses that grow up to a limit, until containerd has taken it.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from pyshim.model.task import TaskEvent, TaskExited
from pyshim.task.translate_events import forward_request
from pyshim.ttrpc import Client, Code, MessageTooLarge, RemoteError, TtrpcError, connected_unix_socket

log = logging.getLogger(__name__)

_SERVICE = "containerd.services.events.ttrpc.v1.Events"
_METHOD = "Forward"
_NAMESPACE_KEY = "containerd-namespace-ttrpc"
# containerd has read the event and would refuse it again.
_REFUSALS = frozenset({Code.INVALID_ARGUMENT, Code.UNIMPLEMENTED})


class PublisherLimits(NamedTuple):
    """The size of the queue, and the sender's times in seconds."""

    queued_events: int = 2048
    call_timeout_s: float = 5.0
    first_pause_s: float = 0.1
    longest_pause_s: float = 5.0


class _Queued(NamedTuple):
    event: TaskEvent
    at_ns: int


class EventPublisher:
    """Publishes to containerd's ttrpc socket `address`, for `namespace`. Nothing is sent while `run` does not run.

    Without an address events are dropped at once: the caller, such as CRI-O, takes none.
    """

    def __init__(
        self,
        *,
        address: str,
        namespace: str,
        limits: PublisherLimits | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._path = address.removeprefix("unix://")
        self._namespace = namespace
        self._limits = limits if limits is not None else PublisherLimits()
        self._clock_ns = clock_ns
        self._queue: deque[_Queued] = deque()
        self._filled = asyncio.Event()
        self._emptied = asyncio.Event()
        self._emptied.set()
        self._client: Client | None = None
        self._dropped = 0

    @property
    def queued(self) -> int:
        """Events that containerd has not taken yet."""
        return len(self._queue)

    def publish(self, event: TaskEvent) -> None:
        """The event is queued, with this moment as its time; events leave in the order of these calls.

        Never waits, never raises. A full queue takes exits only, since containerd waits for those.
        """
        if not self._path:
            return
        if len(self._queue) >= self._limits.queued_events and not isinstance(event, TaskExited):
            self._dropped += 1
            log.warning(
                "event dropped, containerd does not take events",
                extra={"event": type(event).__name__, "container": event.container_id, "dropped": self._dropped},
            )
            return
        self._queue.append(_Queued(event, self._clock_ns()))
        self._emptied.clear()
        self._filled.set()

    async def run(self) -> None:
        """Sends until cancelled. Exactly one task runs it."""
        try:
            while True:
                await self._filled.wait()
                while self._queue:
                    await self._deliver(self._queue[0])
                    # After the delivery: an event whose sending is cancelled stays in the queue.
                    self._queue.popleft()
                self._filled.clear()
                self._emptied.set()
        finally:
            self._disconnect()

    async def flush(self, timeout_s: float) -> bool:
        """True when every event published so far has been taken or refused, after at most `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._emptied.wait()
        if self._queue:
            log.warning("events left unsent", extra={"events": len(self._queue)})
        return not self._queue

    async def _deliver(self, queued: _Queued) -> None:
        fields = {"event": type(queued.event).__name__, "container": queued.event.container_id}
        try:
            request = forward_request(queued.event, namespace=self._namespace, at_ns=queued.at_ns)
        except Exception as error:
            # A value that its field cannot have. Later events must still be sent, and if this task ended, so would the
            # shim and the pod.
            log.error("event cannot be encoded", extra={**fields, "error": str(error)}, exc_info=error)
            return
        pause_s = self._limits.first_pause_s
        failures = 0
        while True:
            try:
                await self._forward(request)
            except Exception as error:  # of any type, for the same reason
                if not isinstance(error, OSError | TtrpcError):
                    log.error("event not delivered", extra=fields, exc_info=error)
                if _is_refusal(error):
                    log.error("event refused by containerd", extra={**fields, "error": str(error)})
                    return
                # After a failed or unanswered call, the next one gets a new connection.
                self._disconnect()
                failures += 1
                if failures == 1:
                    log.warning("event not delivered, trying again", extra={**fields, "error": str(error)})
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, self._limits.longest_pause_s)
                continue
            log.debug("event delivered", extra={**fields, "failures": failures})
            return

    async def _forward(self, request: bytes) -> None:
        if self._client is None or self._client.is_closed:
            self._client = await _connect(self._path, self._limits.call_timeout_s)
        await self._client.call(
            _SERVICE,
            _METHOD,
            request,
            timeout_s=self._limits.call_timeout_s,
            metadata=((_NAMESPACE_KEY, self._namespace),),
        )

    def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()


def _is_refusal(error: Exception) -> bool:
    return isinstance(error, MessageTooLarge) or (isinstance(error, RemoteError) and error.code in _REFUSALS)


async def _connect(path: str, timeout_s: float) -> Client:
    async with asyncio.timeout(timeout_s):
        sock = await connected_unix_socket(path)
    return Client(sock)
