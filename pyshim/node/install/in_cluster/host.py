"""Runs commands on the node from a pod: in the mount namespace of the host's first process."""

import asyncio
import os
import signal
from collections.abc import Sequence

from pyshim.host.processes.children import Children
from pyshim.model.errors import DeadlineExceeded, FailedPrecondition

ENTER = ("/usr/bin/nsenter", "--target", "1", "--mount", "--")
"""Enters the namespace, because systemctl refuses to work in a chroot."""
ROOT = "/proc/1/root"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
UNDO_S = 90.0
"""Seconds that an interrupted command has to undo what it did; the pod's grace period is longer."""
_MAX_BYTES = 4 << 20


class NodeHost:
    """`enter` goes before each command, `root` before each path; tests pass their own."""

    def __init__(self, *, enter: Sequence[str] = ENTER, root: str = ROOT) -> None:
        self._enter = tuple(enter)
        self.root = root
        self._children = Children()

    def at(self, path: str) -> str:
        """The host's `path` as this process sees it."""
        return self.root + path

    def has(self, path: str) -> bool:
        return os.path.exists(self.at(path))

    async def run(self, *command: str, timeout_s: float, codes: Sequence[int] = (0,)) -> str:
        """The stdout of the command; its stderr goes to the log.

        When cancelled, it sends SIGTERM and waits until the command has undone its work. Raises FailedPrecondition with
        the end of its stderr if its exit code is not in `codes`, DeadlineExceeded if it takes longer.
        """
        output = os.memfd_create("output", os.MFD_CLOEXEC)
        try:
            child = await self._children.spawn(
                (*self._enter, *command), env={"PATH": _PATH, "LANG": "C.UTF-8", "HOME": "/root"}, stdout=output
            )
            try:
                async with asyncio.timeout(timeout_s):
                    ended = await child.wait()
            except TimeoutError:
                await child.end(signal_number=signal.SIGTERM, grace_s=UNDO_S)
                raise DeadlineExceeded(f"run '{' '.join(command)}': no end within {timeout_s:g} s") from None
            except asyncio.CancelledError:
                await child.end(signal_number=signal.SIGTERM, grace_s=UNDO_S)
                raise
            printed = os.pread(output, _MAX_BYTES, 0).decode(errors="replace")
        finally:
            os.close(output)
        if ended.signal or ended.code not in codes:
            words = "; ".join(child.last_words()) or printed.strip()[-500:]
            raise FailedPrecondition(f"run '{' '.join(command)}': it {ended}: {words}")
        return printed
