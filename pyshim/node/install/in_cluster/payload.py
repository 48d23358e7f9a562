"""The image's payload (the wheel, its dependencies, the guest), and the commands that a pod runs on its node.

`pyshim install` runs on the host from a copy, in the mount namespace of the host's first process.
"""

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec

from pyshim import PYTHONS
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
_PIP_S = 300.0
_INSTALL_S = 900.0
"""Seconds for `pyshim install`: pip, a restart of containerd and a test pod, whose guest has three minutes."""
PYSHIM = f"{PREFIX}/bin/pyshim"


class Payload(msgspec.Struct, frozen=True, kw_only=True):
    """File names below the image's directory."""

    wheel: str
    pip: str
    """pip's own wheel, with which pip installs itself: a node has Python, but often no pip."""


def read_payload(directory: str) -> Payload:
    """Raises NotFound for a part that is missing, FailedPrecondition for one that is there twice."""
    for name in ("requirements.lock", "guest", "wheels"):
        if not os.path.exists(f"{directory}/{name}"):
            raise NotFound(f"read the payload '{directory}': there is no '{name}'")
    return Payload(wheel=_only(directory, "pyshim-"), pip=_only(f"{directory}/wheels", "pip-"))


def _only(directory: str, begin: str) -> str:
    found = [name for name in os.listdir(directory) if name.startswith(begin) and name.endswith(".whl")]
    if len(found) != 1:
        raise (NotFound if not found else FailedPrecondition)(
            f"read the payload '{directory}': there are {len(found)} wheels {begin}*.whl, not one"
        )
    return found[0]


async def install(
    host: NodeHost, directory: str, *, python: str, handlers: tuple[str, ...], options: tuple[str, ...]
) -> str:
    """`pyshim install --restart` of the payload has run on the host. Returns what it printed.

    Raises ShimError with its error text; then the node is as before.
    """
    payload = read_payload(directory)
    settings = [word.partition("=")[2] for word in handlers if "=" in word]
    await host.run(python, "-I", "-c", _NEEDS_PYTHON, timeout_s=60)
    remove_copies(host)
    with stage_on(host) as (copy, stage):
        shutil.copytree(directory, copy, dirs_exist_ok=True)
        for file in settings:
            shutil.copy(file, copy)
        here = f"{stage}/venv/bin/python"
        pip = (here, "-I", "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-index", "--no-deps")
        await host.run(python, "-I", "-m", "venv", "--without-pip", f"{stage}/venv", timeout_s=_PIP_S)
        await host.run(
            *(here, "-I", f"{stage}/wheels/{payload.pip}/pip", "--disable-pip-version-check", "install", "--quiet"),
            *("--no-index", "--no-deps", f"{stage}/wheels/{payload.pip}"),
            timeout_s=_PIP_S,
        )
        locked = ("--require-hashes", "--find-links", f"{stage}/wheels", "-r", f"{stage}/requirements.lock")
        await host.run(*pip, *locked, timeout_s=_PIP_S)
        await host.run(*pip, f"{stage}/{payload.wheel}", timeout_s=_PIP_S)
        return await host.run(
            *(here, "-I", "-m", "pyshim", "install", "--restart", "--wheel", f"{stage}/{payload.wheel}"),
            *("--wheels", f"{stage}/wheels", "--lock", f"{stage}/requirements.lock", "--guest", f"{stage}/guest"),
            *(word for handler in handlers for word in ("--handler", _on_host(stage, handler))),
            *options,
            timeout_s=_INSTALL_S,
        )


def _on_host(stage: str, handler: str) -> str:
    called, equals, file = handler.partition("=")
    return f"{called}={stage}/{os.path.basename(file)}" if equals else handler


_NEEDS_PYTHON = f"""\
import sys
version = "%d.%d" % sys.version_info[:2]
if version not in {PYTHONS!r}:
    sys.exit(sys.executable + " is Python " + version + "; the supported versions are {", ".join(PYTHONS)}")
"""


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
