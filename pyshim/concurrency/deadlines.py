"""A deadline for a block of work or for every call of a function; its error names the work.

Adapters have a deadline on every call that waits for a neighbour. QMP and the agent's calls have shorter limits, whose
errors say more; the deadlines here act when such a neighbour itself hangs. Without a deadline are the waits for the end
of a VM, the end of a daemon and the bytes of a stream.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from pyshim.model.errors import DeadlineExceeded

P = ParamSpec("P")
T = TypeVar("T")

READ_S = 30.0
"""Seconds for a call that only looks at files, on a busy disk too."""
CHANGE_S = 30.0
"""Seconds for one change on the host, or a probe: a slow file system, the start of a program under load."""
VM_S = 150.0
"""Seconds for one change of a VM: virtio-mem has a limit of two minutes, whose error says more."""
MARGIN_S = 10.0
"""Seconds added to a limit that the neighbour was given."""
UNDO_S = 10.0
"""Seconds for one step of an undo; a resource not released by then stays in the ledger."""


def given_s(timeout_s: float | None) -> float:
    """Seconds for a change whose neighbour was given `timeout_s`: MARGIN_S more, and CHANGE_S at least."""
    return max(CHANGE_S, (timeout_s or 0) + MARGIN_S)


class Within:
    """`async with`: the block is left within `timeout_s`. Raises DeadlineExceeded naming `action` when it was not.

    A TimeoutError that the block itself raises passes.
    """

    def __init__(self, timeout_s: float, action: Callable[[], str]) -> None:
        self._timeout_s = timeout_s
        self._action = action
        self._timeout = asyncio.timeout(timeout_s)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, *error: Any) -> None:
        try:
            await self._timeout.__aexit__(*error)
        except TimeoutError as exc:
            raise DeadlineExceeded(f"{self._action()}: not done within {self._timeout_s:g} s") from exc


def within(timeout_s: float, action: str) -> Within:
    """`Within` for an action whose name is known."""
    return Within(timeout_s, lambda: action)


class Deadline:
    """The deadline that `within_s` gives a function; `deadline_of` returns it."""

    def __init__(
        self, function: Callable[..., object], seconds: float | Callable[..., float], action: str | Callable[..., str]
    ) -> None:
        self._function = function
        self.seconds = seconds
        self.action = action

    def of_call(self, args: tuple[Any, ...], named: Mapping[str, Any]) -> Within:
        """The block in which one call of the function, with these arguments, has to end."""
        seconds = self.seconds(*args, **named) if callable(self.seconds) else self.seconds
        return Within(seconds, lambda: self._named(args, named))

    def _named(self, args: tuple[Any, ...], named: Mapping[str, Any]) -> str:
        if callable(self.action):
            return self.action(*args, **named)
        return self.action.format(**inspect.signature(self._function).bind(*args, **named).arguments)


def within_s(
    seconds: float | Callable[..., float], action: str | Callable[..., str]
) -> Callable[[Callable[P, Awaitable[T]]], Callable[P, Coroutine[Any, Any, T]]]:
    """Decorates an async function: each call ends within `seconds`, or raises DeadlineExceeded naming `action`.

    `action` is a format string over the function's parameters, `"mount '{mount.source}' on '{mount.target}'"`. Either
    may be a function of the call's arguments instead.
    """

    def decorate(function: Callable[P, Awaitable[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
        deadline = Deadline(function, seconds, action)

        @wraps(function)
        async def call(*args: P.args, **kwargs: P.kwargs) -> T:
            async with deadline.of_call(args, kwargs):
                return await function(*args, **kwargs)

        vars(call)["deadline"] = deadline
        return call

    return decorate


def deadline_of(function: object) -> Deadline | None:
    """The function's deadline; None when `within_s` does not decorate it."""
    found: Deadline | None = getattr(function, "deadline", None)
    return found
