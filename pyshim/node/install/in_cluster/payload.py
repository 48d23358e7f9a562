"""The image's payload, which is an unpacked archive of a release, and the commands that a pod runs on its node.

Its `install` runs on the host from a copy, in the mount namespace of the host's first process.
"""

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pyshim.host.processes.children import Children
from pyshim.model.errors import DeadlineExceeded, FailedPrecondition, NotFound
from pyshim.node.install.plan import PREFIX

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


_ABOVE = "/var/lib"
"""Only root can write here. /tmp is open to every user, and often in memory."""
_NAME = "pyshim-install-"
_INSTALL_S = 1500.0
"""Seconds for `install`: pip, twice, a restart of containerd and a test pod, whose guest has three minutes."""
PYSHIM = f"{PREFIX}/bin/pyshim"


def require_payload(directory: str) -> None:
    """Raises NotFound if `directory` is not what `make payload` makes."""
    for name in ("install", "release.json"):
        if not os.path.exists(f"{directory}/{name}"):
            raise NotFound(f"read the payload '{directory}': there is no '{name}'")


async def install(
    host: NodeHost, directory: str, *, python: str, handlers: tuple[str, ...], options: tuple[str, ...]
) -> str:
    """The payload's `install --restart` has run on the host. Returns what it printed.

    An earlier release is installed, too: the chart's own is what the cluster's owner asked for. Raises ShimError with
    its error text; then the node is as before.
    """
    require_payload(directory)
    settings = [word.partition("=")[2] for word in handlers if "=" in word]
    remove_copies(host)
    with stage_on(host) as (copy, stage):
        # Its files must be those of its list: settings come beside it.
        shutil.copytree(directory, f"{copy}/payload")
        for file in settings:
            shutil.copy(file, copy)
        return await host.run(
            *(python, "-I", f"{stage}/payload/install", "--restart", "--downgrade"),
            *(word for handler in handlers for word in ("--handler", _on_host(stage, handler))),
            *options,
            timeout_s=_INSTALL_S,
        )


def _on_host(stage: str, handler: str) -> str:
    called, equals, file = handler.partition("=")
    return f"{called}={stage}/{os.path.basename(file)}" if equals else handler


@contextmanager
def stage_on(host: NodeHost) -> Iterator[tuple[str, str]]:
    """A new directory of the host: its path for this process, and for the host. It is removed afterwards."""
    made = tempfile.mkdtemp(prefix=_NAME, dir=host.at(_ABOVE))
    try:
        yield made, f"{_ABOVE}/{os.path.basename(made)}"
    finally:
        shutil.rmtree(made, ignore_errors=True)


def remove_copies(host: NodeHost) -> None:
    """The copies of agents that were killed are gone."""
    above = host.at(_ABOVE)
    for name in os.listdir(above):
        if name.startswith(_NAME):
            shutil.rmtree(f"{above}/{name}", ignore_errors=True)
