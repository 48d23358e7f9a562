"""The shim's side of its child in a network namespace: started, asked, and gone when the block is left."""

import asyncio
import errno
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from types import TracebackType
from typing import Any, Self

from pyshim.concurrency.tasks import to_the_end
from pyshim.host.fds import OwnedFd
from pyshim.host.processes.children import Child, Children
from pyshim.model.errors import DeadlineExceeded, FailedPrecondition, Internal
from pyshim.resources.network.host.messages import SOCKET_FD, Inbox, encoded
from pyshim.resources.network.host.netns import locked_netns

# `-S` keeps site-packages out of the child, so it gets the shim's import path.
_PROGRAM = (
    "import sys; sys.path += [path for path in sys.argv[1:] if path not in sys.path]; "
    "from pyshim.resources.network.host.child import main; main()"
)
_ENV = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
_EXIT_TIMEOUT_S = 1.0


class StepFailed(FailedPrecondition):
    """The kernel refused a step of the wiring; the text says which and why."""


class NetworkSession:
    """Questions to a child that runs in one network namespace. Made by `open`; a context manager that ends it."""

    def __init__(self, child: Child, connection: socket.socket, netns_path: str) -> None:
        self._child = child
        self._connection = connection
        self._netns_path = netns_path
        self._inbox = Inbox()

    @classmethod
    async def open(cls, children: Children, netns_fd: int, netns_path: str) -> Self:
        """The child runs in the namespace `netns_fd` is open on; the path is for messages. Raises SpawnFailed."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            with theirs:
                # Not in the ledger: it ends by itself when our end of the socket closes, also when we crash.
                child = await children.spawn(
                    (sys.executable, "-I", "-S", "-c", _PROGRAM, *_import_paths()),
                    env=_ENV,
                    fds={SOCKET_FD: theirs.fileno()},
                    # Not the path once more: it could name another namespace by now.
                    netns_path=f"/proc/self/fd/{netns_fd}",
                )
        except BaseException:
            ours.close()
            raise
        return cls(child, ours, netns_path)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()
        self._inbox.close()
        # Also when the caller is cancelled now: a later undo must not race with the child.
        await to_the_end(self._child.end())

    async def ask(self, step: str, question: dict[str, Any]) -> tuple[Any, list[OwnedFd]]:
        """The child's answer and the descriptors with it. Raises StepFailed: `step: EEXIST (file exists)`."""
        loop = asyncio.get_running_loop()
        with suppress(BrokenPipeError, ConnectionResetError):  # the end of the stream has the reason
            await loop.sock_sendall(self._connection, encoded(question))
        answer, fds = await self._answer(step)
        if "ok" in answer:
            return answer["ok"], fds
        error = answer.get("error")
        if not isinstance(error, dict):
            raise Internal(f"{step} in network namespace {self._netns_path!r}: the child's answer is malformed")
        number, text = error.get("errno"), str(error.get("text", "")).lower()
        cause = f"{errno.errorcode.get(number, number)} ({text})" if number else text
        raise StepFailed(f"{step} in network namespace {self._netns_path!r}: {cause}")

    async def _answer(self, step: str) -> tuple[dict[str, Any], list[OwnedFd]]:
        where = f"{step} in network namespace {self._netns_path!r}"
        while True:
            try:
                message = self._inbox.next()
            except ValueError as error:
                raise Internal(f"{where}: the child's answer: {error}") from error
            if message is not None:
                return message
            if not await self._receive():
                with suppress(TimeoutError):
                    async with asyncio.timeout(_EXIT_TIMEOUT_S):
                        await self._child.wait()
                raise Internal(f"{where}: {self._child.describe_exit()}")

    async def _receive(self) -> bool:
        """Bytes have arrived; False at the end of the stream."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                return self._inbox.receive(self._connection)
            except ConnectionResetError:
                return False
            except BlockingIOError:
                pass
            readable = asyncio.Event()
            loop.add_reader(self._connection, readable.set)
            try:
                await readable.wait()
            finally:
                loop.remove_reader(self._connection)


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

        `at_failure` undoes what a failing block has made: after the child has ended, so that it makes no more,
        and before another sandbox may look. Raises what `locked_netns` does, FailedPrecondition when the path leads to
        another namespace than before, DeadlineExceeded.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                with locked_netns(self.path) as netns_fd:
                    self._check(os.fstat(netns_fd).st_ino)
                    try:
                        async with await NetworkSession.open(self._children, netns_fd, self.path) as session:
                            yield session
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


def _import_paths() -> list[str]:
    return [os.path.abspath(path) for path in sys.path]
