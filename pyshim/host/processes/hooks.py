"""Runs the OCI hooks of a container on this host, and gives them a process in the pod's network namespace."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from pyshim.host.fds import OwnedFd
from pyshim.host.processes.children import Child, Children
from pyshim.host.processes.launch import Isolation, SpawnFailed
from pyshim.model.errors import DeadlineExceeded, FailedPrecondition
from pyshim.model.oci import OciHook

DEFAULT_TIMEOUT_S = 120
"""Seconds for a hook whose spec sets no limit. nerdctl's waits for other containers on a lock, so it is long."""
_UNTIL_STDIN_ENDS = "import sys; sys.stdin.read()"


class HookFailed(FailedPrecondition):
    """A hook could not be started, or has ended with another status than 0."""


def hook_timeout_s(hook: OciHook) -> float:
    return hook.timeout or DEFAULT_TIMEOUT_S


async def run_hook(children: Children, kind: str, hook: OciHook, state: bytes) -> None:
    """The hook has read `state` from its stdin and exited with status 0.

    Its environment is the spec's and nothing else. Its stdout is dropped; its stderr goes to the log, and the last
    lines to the error. Processes that it leaves behind live on: a network of nerdctl needs one. At its timeout, or when
    the caller is cancelled, the hook is killed with its process group. Raises HookFailed or DeadlineExceeded naming it.
    """
    what = f"run {kind} hook {hook.path!r}"
    timeout_s = hook_timeout_s(hook)
    env = dict(variable.split("=", 1) for variable in hook.env or ())
    with _readable(state) as stdin:
        try:
            child = await children.spawn(
                hook.args or (hook.path,), program=hook.path, env=env, stdin=stdin.fileno(), dumps_core=True
            )
        except SpawnFailed as error:
            raise HookFailed(f"{what}: {error}") from error
    try:
        async with asyncio.timeout(timeout_s):
            ended = await child.wait()
    except TimeoutError:
        raise DeadlineExceeded(f"{what}: no end within {timeout_s:g} s{_output(child)}") from None
    finally:
        await _end_group(child)
    if ended.code or ended.signal:
        raise HookFailed(f"{what}: it {ended}{_output(child)}")


def _readable(content: bytes) -> OwnedFd:
    """A file in memory: unlike a pipe it takes any size without a writer, and a hook need not read it."""
    fd = OwnedFd(os.memfd_create("hook-state", os.MFD_CLOEXEC))
    with open(fd.fileno(), "wb", closefd=False) as file:
        file.write(content)
    os.lseek(fd.fileno(), 0, os.SEEK_SET)
    return fd


def _output(child: Child) -> str:
    lines = child.last_words()
    return f": {'; '.join(lines)}" if lines else ""


async def _end_group(child: Child) -> None:
    """A hook that still runs is killed, with its process group: it is the leader, so the number is not another's."""
    if child.exit is None:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        await child.end()


@asynccontextmanager
async def netns_member(children: Children, netns_path: str) -> AsyncIterator[int]:
    """The pid of a process in the network namespace at the path that lives until the block is left.

    Hooks enter the pod's namespace by a pid, and there is no VM yet. The process ends with the shim, too: its stdin is
    a pipe that the shim has open. Raises SpawnFailed.
    """
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    with OwnedFd(write_fd):
        with OwnedFd(read_fd):
            child = await children.spawn(
                (sys.executable, "-I", "-S", "-c", _UNTIL_STDIN_ENDS),
                env={},
                stdin=read_fd,
                isolation=Isolation(netns_path=netns_path),
            )
        try:
            yield child.pid
        finally:
            await child.end()
