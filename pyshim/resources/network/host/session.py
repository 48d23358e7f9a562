"""Sessions with the child in a pod's network namespace: the shim starts it, asks it and ends it."""

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from pyshim.concurrency.tasks import to_the_end
from pyshim.host.fds import OwnedFd
from pyshim.host.processes.children import Children
from pyshim.host.processes.launch import Isolation
from pyshim.host.python_child.asking import PythonChild, spawn_python
from pyshim.model.errors import DeadlineExceeded, FailedPrecondition, Internal
from pyshim.resources.network.host.netns import locked_netns

_CHILD = "pyshim.resources.network.host.child"


class StepFailed(FailedPrecondition):
    """The kernel refused a step of the wiring; the text says which and why."""


class NetworkSession:
    """Questions to a child that runs in the network namespace at `netns_path`."""

    def __init__(self, child: PythonChild, netns_path: str) -> None:
        self._child = child
        self._netns_path = netns_path

    async def ask(self, step: str, question: dict[str, Any]) -> tuple[Any, list[OwnedFd]]:
        """The child's answer and the descriptors with it. Raises StepFailed: `step: EEXIST (file exists)`."""
        action = f"{step} in network namespace {self._netns_path!r}"
        answer, fds = await self._child.ask(action, question)
        if "ok" in answer:
            return answer["ok"], fds
        error = answer.get("error")
        if not isinstance(error, dict):
            raise Internal(f"{action}: the child's answer is malformed")
        number, text = error.get("errno"), str(error.get("text", "")).lower()
        cause = f"{errno.errorcode.get(number, number)} ({text})" if number else text
        raise StepFailed(f"{action}: {cause}")


class PodNamespace:
    """The network namespace of one pod, entered by a child for each look and each wiring."""

    def __init__(self, children: Children, path: str, timeout_s: float) -> None:
        self.path = path
        self.inode = 0
        """Inode of the namespace that was at the path when it was first entered."""
        self._children = children
        self._timeout_s = timeout_s

    @asynccontextmanager
    async def session(
        self, at_failure: Callable[[], Coroutine[Any, Any, None]] | None = None
    ) -> AsyncIterator[NetworkSession]:
        """The namespace is this sandbox's alone until the block is left, at the latest after the timeout.

        `at_failure` undoes what a failing block has made: after the child has ended, which makes nothing then,
        and before another sandbox may look. Raises what `locked_netns` does, FailedPrecondition when the path leads to
        another namespace than before, DeadlineExceeded.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                with locked_netns(self.path) as netns_fd:
                    self._check(os.fstat(netns_fd).st_ino)
                    try:
                        # `self.path` could lead to another namespace meanwhile.
                        netns_path = f"/proc/self/fd/{netns_fd}"
                        child = PythonChild(
                            *await spawn_python(self._children, _CHILD, isolation=Isolation(netns_path=netns_path))
                        )
                        try:
                            yield NetworkSession(child, self.path)
                        finally:
                            # Also if the caller is cancelled: a later undo must not race with the child.
                            await to_the_end(child.close())
                    except BaseException:
                        if at_failure is not None:
                            await to_the_end(at_failure())
                        raise
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"connect network namespace {self.path!r}: not done within {self._timeout_s:g} s"
            ) from error

    def _check(self, inode: int) -> None:
        if self.inode not in (0, inode):
            raise FailedPrecondition(f"enter network namespace {self.path!r}: another one is at this path by now")
        self.inode = inode
