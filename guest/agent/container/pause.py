"""The process that holds a pid namespace open for containers that share it. It is PID 1 there: it reaps, and nothing
else.
"""

from __future__ import annotations

import os

from guest.agent.errors import Internal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from guest.agent.agent import Agent


def start_pause(agent: Agent) -> int:
    """The pid of a new pause process, seen from here. It is killed with the agent's own pid namespace, or by
    DestroySandbox's end.
    """
    from guest.agent.storage import syscalls

    agent.crun  # noqa: B018  (makes the agent a subreaper: the pause process must become its child)
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    agent.children.expect()
    try:
        middle = os.fork()
        if middle == 0:
            _middle(write_end, syscalls.unshare, syscalls.CLONE_NEWPID)
        os.close(write_end)
        text = os.read(read_end, 32)
        if not text.isdigit():
            raise Internal(f"start pause process: {text.decode('utf-8', 'replace') or 'it ended'}")
        pid = int(text)
        agent.children.adopt(pid)
        return pid
    finally:
        os.close(read_end)
        agent.children.expected()


def _middle(write_end: int, unshare: object, flag: int) -> None:
    """In the first child: makes the namespace, forks its PID 1, reports its pid, ends."""
    try:
        unshare(flag)  # type: ignore[operator]
        pid = os.fork()
        if pid == 0:
            _pause()
        os.write(write_end, str(pid).encode())
    except BaseException as error:
        os.write(write_end, repr(error)[:31].encode())
    finally:
        os._exit(0)


def _pause() -> None:
    from guest.agent.runtime.signals import block_and_wait_for_children

    try:
        os.closerange(3, 65536)
        block_and_wait_for_children(_reap)
    finally:
        os._exit(1)


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
