"""Undo of a failed creation or of an object that has ended: its steps, last first."""

import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from pyshim.concurrency.deadlines import UNDO_S, within
from pyshim.concurrency.tasks import to_the_end
from pyshim.model.errors import ShimError
from pyshim.model.ledger import Ledger, LedgerEntry, ResourceKind

log = logging.getLogger(__name__)


class _Step(NamedTuple):
    take: Callable[[], Awaitable[None]]
    limit_s: float


class Undo:
    """Steps that undo something, each idempotent, pushed before or as soon as there may be something to undo."""

    def __init__(self, of: str) -> None:
        self._of = of
        self._steps: list[_Step] = []

    def __len__(self) -> int:
        """The number of steps that were not taken or have failed."""
        return len(self._steps)

    def push(self, step: Callable[..., Awaitable[None]], *args: Any) -> None:
        self.push_for(UNDO_S, step, *args)

    def push_for(self, limit_s: float, step: Callable[..., Awaitable[None]], *args: Any) -> None:
        """As `push`, for a step that may take `limit_s`."""
        self._steps.append(_Step(partial(step, *args), limit_s))

    def acquire(self, ledger: Ledger, *entries: LedgerEntry) -> None:
        """The intents are in the ledger, and their releases among the steps."""
        if entries:
            ledger.acquire(*entries)
        for entry in entries:
            self.push(ledger.release, entry)

    async def run(self, *, down_to: int = 0) -> Exception | None:
        """Every step was tried, last first, also when the caller is cancelled; what failed stays for the next run.

        The first `down_to` steps are left alone.

        The first failure is returned, not raised: it must never hide the error that made the undo necessary.
        """
        return await to_the_end(self._run(down_to))

    async def _run(self, down_to: int) -> Exception | None:
        failed: list[tuple[_Step, Exception]] = []
        while len(self._steps) > down_to:
            step = self._steps.pop()
            try:
                async with within(step.limit_s, _described(step.take)):
                    await step.take()
            except Exception as exc:  # the other steps must clean the host even after an unforeseen error
                bug = None if isinstance(exc, ShimError) else exc
                log.warning("undo failed", extra={"of": self._of, "error": str(exc)}, exc_info=bug)
                failed.append((step, exc))
        self._steps.extend(step for step, _ in reversed(failed))
        return failed[0][1] if failed else None


def _described(step: Callable[[], Awaitable[None]]) -> str:
    """`release mount '/run/...'`, `stop`: for the step's deadline."""
    call = step.func if isinstance(step, partial) else step
    name = getattr(call, "__name__", "step").strip("_").replace("_", " ")
    entry = next((arg for arg in getattr(step, "args", ()) if isinstance(arg, LedgerEntry)), None)
    return f"{name} {entry.kind.value} '{entry.key}'" if entry is not None else f"{name} in undo"


class AcquiredEntries:
    """Entries in the order they were made."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._entries: dict[tuple[ResourceKind, str], LedgerEntry] = {}

    @property
    def entries(self) -> tuple[LedgerEntry, ...]:
        return tuple(self._entries.values())

    def acquire(self, *entries: LedgerEntry) -> None:
        """The intents are on disk, by one write; call before the resources are made.

        An entry stands in place of one of its kind and key that was acquired before.
        """
        self._ledger.acquire(*entries)
        self._entries.update({(entry.kind, entry.key): entry for entry in entries})

    async def release(self, entries: Sequence[LedgerEntry]) -> None:
        """The resources are released, the last first, and their entries removed.

        Raises the first ShimError after all were tried; entries of resources that could not be released stay.
        """
        failure: ShimError | None = None
        for entry in reversed(entries):
            try:
                await self._ledger.release(entry)
            except ShimError as error:
                failure = failure or error
            else:
                del self._entries[entry.kind, entry.key]
        if failure is not None:
            raise failure
