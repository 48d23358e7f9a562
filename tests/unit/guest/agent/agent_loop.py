"""Coroutines on the guest agent's own loop, from outside it."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from guest.agent.runtime.loop import Loop, Promise


def run(loop: Loop, coro: Coroutine[Promise, None, Any]) -> Any:
    task = loop.spawn("test", coro)
    loop.run_until(lambda: task.result.done)
    if task.result.error is not None:
        raise task.result.error
    return task.result.value


def turns(loop: Loop, count: int = 5) -> None:
    for _ in range(count):
        loop.call_later(0.001, lambda: None)  # a turn waits for the next event: let there be one
        loop.turn()
