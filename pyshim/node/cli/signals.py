"""Signals that end a verb whose work has to be undone."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager

_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


@contextmanager
def undone_at_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as Ctrl-C does, by KeyboardInterrupt. The undo of its work ignores all three.

    A signal that was ignored before, as nohup(1) has it, is so in the block.
    """

    def interrupt(_number: int, _frame: object) -> None:
        for number in before:
            signal.signal(number, lambda _number, _frame: None)
        raise KeyboardInterrupt

    heeded = [number for number in _ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
