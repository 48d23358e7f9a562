"""The process that is kept: the agent with all its modules, nothing open, before its first step."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import gc
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

# Rare, with much of the standard library behind them: images that the guest pulls itself, devices passed in.
LATER = ("guest.agent.__main__", "guest.agent.pull", "guest.agent.container.cdi")
# Of the standard library, what the agent's functions import when they run.
LAZY = ("errno", "fcntl", "struct", "termios", "traceback")
ENVIRONMENT = {"LD_BIND_NOW": "1"}  # no call looks for its function later, in every guest anew
AGENT_ARGV = ("/usr/bin/python3", "-I", "-S", "/usr/lib/agent/start.pyc")
IGNORED_SIGNALS = (_signal.SIGPIPE, _signal.SIGXFSZ)
CAUGHT_SIGNALS = (_signal.SIGINT,)
ARGUMENT = "subject"  # one more word: the entry stops here


def kept_modules(modules: Iterable[str]) -> list[str]:
    """The agent's of `modules` that a guest has from the start."""
    return [name for name in modules if name.startswith("guest.agent.") and not name.startswith(LATER)]


def stay_here(modules: Iterable[str]) -> None:
    """Import the agent's of `modules` and stop until the tracer has kept this process. Returns in every guest that goes
    on from here.

    What only the kernel knew of the process is not kept: the signals that the interpreter set at its start are set
    again. (The rest is made by whoever goes on: descriptors 0 to 2, the session, the working directory.)
    """
    for module in (*kept_modules(modules), *LAZY):
        __import__(module)
    for name in ENVIRONMENT:
        del os.environ[name]
    sys.argv.remove(ARGUMENT)
    gc.collect()
    gc.freeze()
    os.kill(os.getpid(), _signal.SIGSTOP)
    for number in IGNORED_SIGNALS:
        _signal.signal(number, _signal.SIG_IGN)
    for number in CAUGHT_SIGNALS:
        _signal.signal(number, _signal.default_int_handler)
