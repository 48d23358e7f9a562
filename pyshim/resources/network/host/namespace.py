"""A pod's network namespace: checked, locked by one sandbox at a time, and entered by a child that the shim asks."""

import asyncio
import errno
import fcntl
import glob
import os
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

from pyshim.concurrency.tasks import to_the_end
from pyshim.host.fds import OwnedFd
from pyshim.host.mounts.mounting import perform_mount
from pyshim.host.os_errors import describe_os_error, os_errors
from pyshim.host.processes.children import Children
from pyshim.host.processes.launch import Isolation
from pyshim.host.python_child import PythonChild, spawn_python
from pyshim.host.syscalls import CLONE_NEWNET, unshare
from pyshim.host.threads import in_short_thread, in_thread
from pyshim.model.errors import DeadlineExceeded, FailedPrecondition, Internal, InvalidArgument, NotFound
from pyshim.model.ids import HostPath
from pyshim.model.volumes import HostMount, TargetKind
from pyshim.resources.network.host.rtnetlink import in_netns, open_news
from pyshim.resources.network.plan.network import OWN_NETNS, RESOLVER_ADDRESS, HostsNetwork

DNS_PORT = 53
_NS_GET_NSTYPE = 0xB703
"""ioctl_ns(2)."""


def make_netns(path: str) -> None:
    """A new network namespace is bound on `path`. It stays until that is unmounted. Raises ShimError.

    Its loopback interface is down, as after unshare(2).
    """

    def run() -> None:
        with os_errors(f"make network namespace {path!r}"):
            unshare(CLONE_NEWNET)
        perform_mount(
            HostMount(
                type="bind",
                source=f"/proc/self/task/{threading.get_native_id()}/ns/net",
                target=HostPath(path),
                target_kind=TargetKind.FILE,
                options=("bind",),
                propagation=None,
                beneath=None,
            )
        )

    in_short_thread(run)


@contextmanager
def locked_netns(path: str) -> Iterator[int]:
    """An fd of the network namespace at `path`; locked against other sandboxes until the block is left.

    Raises NotFound when there is nothing at `path`, InvalidArgument for a file of another type and for the shim's own
    (a pod on the host's network cannot be moved into a VM), FailedPrecondition for the namespace of another sandbox and
    while another one has locked it.
    """
    subject = f"open network namespace {path!r}"
    try:
        # Never block on a FIFO, never open a device.
        namespace = OwnedFd(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFound(f"{subject}: {describe_os_error(error)}") from error
    except (OSError, ValueError) as error:
        cause = describe_os_error(error) if isinstance(error, OSError) else str(error)
        raise InvalidArgument(f"{subject}: {cause}") from error
    with namespace:
        _check(namespace.fileno(), subject)
        _check_owner(namespace.fileno(), path)
        with os_errors(f"lock network namespace {path!r}", hint="another sandbox is using it"):
            # Two sandboxes in one namespace: the second must not look before the first has finished wiring.
            fcntl.flock(namespace.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield namespace.fileno()


def _check(fd: int, subject: str) -> None:
    try:
        kind = fcntl.ioctl(fd, _NS_GET_NSTYPE)
    except OSError:
        kind = 0
    if kind != CLONE_NEWNET:
        raise InvalidArgument(f"{subject}: not a network namespace")
    theirs, ours = os.fstat(fd), os.stat("/proc/self/ns/net")
    if (theirs.st_dev, theirs.st_ino) == (ours.st_dev, ours.st_ino):
        # Without the path: CRI-O pins the namespace under another name at each attempt, and equal events merge.
        raise HostsNetwork("it is the host's")


_CHILD = "pyshim.resources.network.host.child"


def _check_owner(fd: int, path: str) -> None:
    """Raises FailedPrecondition for a namespace that another sandbox has made: its links are that one's."""
    theirs = os.fstat(fd)
    for other in glob.iglob(f"{OWN_NETNS}*"):
        with suppress(FileNotFoundError):
            if other != path and os.path.samestat(os.stat(other), theirs):
                sandbox_id = other.removeprefix(OWN_NETNS)
                raise FailedPrecondition(
                    f"enter network namespace {path!r}: it is that of sandbox '{sandbox_id}', and two VMs cannot share"
                    " one"
                )


def _connected_to_resolver() -> socket.socket | None:
    """In the calling thread's namespace. The resolver listens at a port of its own; netfilter leads port 53 there."""
    address = int.from_bytes(socket.inet_aton(RESOLVER_ADDRESS), sys.byteorder)
    with open("/proc/thread-self/net/udp", encoding="ascii") as table:
        if not any(f" {address:08X}:" in line for line in table):
            return None
    connection = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    try:
        connection.connect((RESOLVER_ADDRESS, DNS_PORT))
    except BaseException:
        connection.close()
        raise
    return connection


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

    async def watched_from_birth(self) -> OwnedFd:
        """A socket that receives the changes of a namespace that nobody else knows yet. Raises ShimError."""

        def watch() -> OwnedFd:
            self._check(os.stat(self.path).st_ino)
            return in_netns(self.path, self.inode, open_news)

        with os_errors(f"watch network namespace {self.path!r}"):
            return await in_thread(watch)

    async def resolver_socket(self) -> socket.socket | None:
        """A datagram socket of the namespace that is connected to the resolver of its caller; None without a resolver.

        Raises ShimError.
        """
        with os_errors(f"look for a resolver in network namespace {self.path!r}"):
            return await asyncio.to_thread(in_netns, self.path, self.inode, _connected_to_resolver)

    def _check(self, inode: int) -> None:
        if self.inode not in (0, inode):
            raise FailedPrecondition(f"enter network namespace {self.path!r}: another one is at this path by now")
        self.inode = inode
