"""Deadlines for fakes: what a real neighbour's calls have, those of its fake have as well."""

from collections.abc import Callable
from typing import TypeVar

from pyshim.concurrency.deadlines import deadline_of, within_s

C = TypeVar("C", bound=type)


def deadlines_of(real: type) -> Callable[[C], C]:
    """Decorates a fake: each of its calls ends within the deadline, and in the words, of the same call of `real`."""

    def decorate(fake: C) -> C:
        for name, call in tuple(vars(fake).items()):
            deadline = deadline_of(getattr(real, name, None))
            if deadline is not None and deadline_of(call) is None:
                setattr(fake, name, within_s(deadline.seconds, deadline.action)(call))
        return fake

    return decorate
