"""The seams with points in them: every call passes on to the real neighbour, through a point on either side."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar, cast

from msgspec.structs import replace

from hypervisors.base import Hypervisor
from pyshim.concurrency.deadlines import deadline_of
from pyshim.model.config import Config
from pyshim.model.errors import FailedPrecondition
from pyshim.model.ids import SandboxId
from pyshim.model.ledger import Ledger
from pyshim.model.seams import AgentConnector, Records
from pyshim.pod.environment import Environment
from pyshim.ttrpc import Client, Code, RemoteError
from tests.failpoints.points import VARIABLE, Failpoints, Step, parse, steps

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

_RESULTS = {
    "host.start_virtiofsd": "virtiofsd",
    "host.open_streams": "streams",
    "network.connect": "network",
    "network.connect_direct": "network",
}
"""Calls whose result is a neighbour of its own."""
_GIVES = {"host.cgroups": "cgroups"}
"""The same for a call without points."""
_PARTS = {"records.ledger": "ledger", "streams.stdin": "stdin", "streams.stdout": "output", "streams.stderr": "output"}


class Seam:
    """Stands for `target`: its calls have points under the seam's name, everything else is as it is.

    The one object here that stands for another by name: so every call of a protocol has its points, a new one as well.
    """

    def __init__(self, faults: Failpoints, name: str, target: object) -> None:
        self._faults = faults
        self._name = name
        self._target = target
        self._steps = steps()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        full = f"{self._name}.{name}"
        if full in _PARTS:
            return None if value is None else Seam(self._faults, _PARTS[full], value)
        if full in _GIVES:
            return lambda *args: Seam(self._faults, _GIVES[full], value(*args))
        if self._name == "ledger":
            return self._ledger_call(full, value)
        step = self._steps.get(full)
        if step is None:
            return value
        return awaited(self._faults, step, value) if step.is_async else at_once(self._faults, step, value)

    def _ledger_call(self, full: str, call: Callable[..., Any]) -> Any:
        def by_kind(*entries: Any) -> Any:
            pointed = call
            for kind in reversed(dict.fromkeys(entry.kind for entry in entries)):
                if step := self._steps.get(f"{full}.{kind.value}"):
                    pointed = (awaited if step.is_async else at_once)(self._faults, step, pointed)
            return pointed(*entries)

        return by_kind


def at_once(faults: Failpoints, step: Step, call: Callable[P, T]) -> Callable[P, T]:
    """`call`, which is not awaited, with its points."""

    def pointed(*args: P.args, **named: P.kwargs) -> T:
        faults.reach_now(f"{step.name}:before")
        result = call(*args, **named)
        faults.reach_now(f"{step.name}:after")
        return result

    return pointed


def awaited(faults: Failpoints, step: Step, call: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
    """`call` with its points, all within the deadline that it has."""

    async def pointed(*args: P.args, **named: P.kwargs) -> T:
        async with _deadline(call, args, named):
            if await faults.reach(f"{step.name}:before"):
                await _for_ever()
            result = await call(*args, **named)
            try:
                if await faults.reach(f"{step.name}:after"):
                    await _for_ever()
            except BaseException:
                await _dispose(result)
                raise
        return seam(faults, _RESULTS[step.name], result) if step.name in _RESULTS else result

    return pointed


def _deadline(
    call: Callable[..., object], args: tuple[Any, ...], named: Mapping[str, Any]
) -> AbstractAsyncContextManager[None]:
    deadline = deadline_of(call)
    if deadline is None:
        return nullcontext()
    bound_to = getattr(call, "__self__", None)  # the deadline is of the function: its arguments begin with the object
    return deadline.of_call(args if bound_to is None else (bound_to, *args), named)


async def _dispose(result: object) -> None:
    """A neighbour that fails keeps nothing open: what only its result could have ended is ended."""
    for name in ("close", "stop", "disconnect"):
        end = getattr(result, name, None)
        if end is not None:
            await end()
            return


async def _for_ever() -> None:
    await asyncio.get_running_loop().create_future()


class AgentWire:
    """The connection to the agent, with points around its calls (`agent.client.Wire`).

    A call that hangs is made to a peer that reads and never answers.
    """

    def __init__(self, faults: Failpoints, client: Client) -> None:
        self._faults = faults
        self._client = client
        self._known = steps()
        self._silent: tuple[Client, socket.socket] | None = None

    async def call(self, service: str, method: str, payload: bytes, *, timeout_s: float | None, **limits: Any) -> bytes:
        name = f"agent.{method}"
        if name not in self._known:
            return await self._client.call(service, method, payload, timeout_s=timeout_s, **limits)
        if await self._reach(f"{name}:before"):
            return await self._unanswered(service, method, payload, timeout_s)
        reply = await self._client.call(service, method, payload, timeout_s=timeout_s, **limits)
        if await self._reach(f"{name}:after"):
            return await self._unanswered(service, method, payload, timeout_s)
        return reply

    async def _reach(self, point: str) -> bool:
        try:
            return await self._faults.reach(point)
        except FailedPrecondition as exc:
            raise RemoteError(Code.INTERNAL, str(exc)) from exc

    async def _unanswered(self, service: str, method: str, payload: bytes, timeout_s: float | None) -> bytes:
        if self._silent is None:
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            self._silent = Client(ours), theirs
        hung = asyncio.ensure_future(self._silent[0].call(service, method, payload, timeout_s=timeout_s))
        lost = asyncio.ensure_future(self._client.closed())
        try:
            await asyncio.wait([hung, lost], return_when=asyncio.FIRST_COMPLETED)
            if not hung.done():
                self._close_silent()
            return await hung
        finally:
            lost.cancel()
            hung.cancel()
            await asyncio.gather(hung, lost, return_exceptions=True)

    def _close_silent(self) -> None:
        if self._silent is not None:
            self._silent[0].close()
            self._silent[1].close()
            self._silent = None

    @property
    def close_error(self) -> Exception | None:
        return self._client.close_error

    async def closed(self) -> None:
        await self._client.closed()

    def close(self) -> None:
        self._close_silent()
        self._client.close()


def seam(faults: Failpoints, name: str, target: T) -> T:
    """`target` with points around its calls."""
    return cast("T", Seam(faults, name, target))


class Faults:
    """The composition root's wrappers of its neighbours, by the variable PYSHIM_FAILPOINTS."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._faults = Failpoints(parse(environ[VARIABLE]))
        log.warning("failpoints are on", extra={"points": environ[VARIABLE]})

    def children(self, children: T) -> T:
        return seam(self._faults, "children", children)

    def wire(self, client: Client) -> AgentWire:
        return AgentWire(self._faults, client)

    def environment(self, environment: Environment) -> Environment:
        return with_points(self._faults, environment)


def with_points(faults: Failpoints, environment: Environment) -> Environment:
    """The same neighbours, with points around every call of theirs."""
    known = steps()

    def function(name: str, call: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
        return awaited(faults, known[name], call)

    def hypervisor(ledger: Ledger, name: str) -> Hypervisor:
        return seam(faults, "hypervisor", environment.hypervisor_factory(ledger, name))

    def connector(config: Config) -> AgentConnector:
        return seam(faults, "agent", environment.connector_factory(config))

    async def records(sandbox_id: SandboxId) -> Records:
        return seam(faults, "records", await function("records.open", environment.open_records)(sandbox_id))

    return replace(
        environment,
        host=seam(faults, "host", environment.host),
        load_config=function("config.load", environment.load_config),
        host_facts=function("host.facts", environment.host_facts),
        capacity=function("host.capacity", environment.capacity),
        hypervisor_factory=hypervisor,
        connector_factory=connector,
        network_connector=seam(faults, "network", environment.network_connector),
        publisher=seam(faults, "publisher", environment.publisher),
        open_records=records,
    )
