"""The pause process keeps a pid namespace open for the containers that share it. It is PID 1 there, and only reaps."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

from guest.agent import syscalls
from guest.agent.children import Child, Children
from guest.agent.errors import Internal


def start_pause(children: Children) -> Child:
    """A new pause process. It ends with the agent's pid namespace, or when the sandbox is destroyed.

    unshare(2) makes a pid namespace for the caller's further children, but the agent's belong in its own. So a first
    child unshares and forks the pause process, which becomes the agent's child when the first one ends.
    """
    read_end, write_end = os.pipe()
    with children.expecting() as adopt:
        try:
            middle = os.fork()
            if middle == 0:
                _middle(write_end)
            os.close(write_end)
            text = os.read(read_end, 32)
        finally:
            os.close(read_end)
        if not text.isdigit():
            raise Internal(f"start pause process: {text.decode('utf-8', 'replace') or 'it ended'}")
        return adopt(int(text))


def _middle(write_end: int) -> None:
    """In the first child: makes the namespace, forks its PID 1, reports its pid, ends."""
    try:
        syscalls.unshare(syscalls.CLONE_NEWPID)
        pid = os.fork()
        if pid == 0:
            _pause()
        os.write(write_end, str(pid).encode())
    except BaseException as error:
        os.write(write_end, repr(error)[:31].encode())
    finally:
        os._exit(0)


def _pause() -> None:
    try:
        signal.set_wakeup_fd(-1)  # this process does not run the agent's loop
        os.closerange(3, 65536)
        # Blocked before the first look, so that no end is missed between looking and waiting.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        while True:
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            signal.sigwait([signal.SIGCHLD])
    finally:
        os._exit(1)
