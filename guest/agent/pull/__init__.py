"""Images pulled in the guest: from a registry over plain HTTP, or from an OCI image layout.

`image_root` is the storage driver. The work is done in a forked child, so that the agent answers meanwhile and a broken
image costs no more than the child. `source.py` finds manifest and layers, `layers.py` unpacks them.
"""

from __future__ import annotations

import os

from guest.agent import log
from guest.agent.errors import FailedPrecondition, Internal
from guest.agent.storage import mounts
from guest.agent.storage.files import remove_tree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from guest.agent.agent import Agent

IMAGES = "/run/kata-containers/images"
CONTAINERS = "/run/kata-containers"
PAUSE = "pause"
_BUSYBOX = ("/bin/busybox", "/usr/bin/busybox")
_PAUSE_SCRIPT = b"#!/bin/sh\ntrap 'exit 0' INT TERM\nwhile :; do sleep 2147483647 & wait $! || sleep 1; done\n"
_MAX_ANSWER_BYTES = 4096
_SIGKILL = 9


_directories: dict[str, str] = {}
"""The directory of each image pulled so far, by its name: a name means the same image as long as the guest lives."""


async def prepare(agent: Agent, image: str) -> str:
    """The directory of the image's files, pulled unless the guest has them. Raises what `pulled` raises."""
    if image == PAUSE:
        return pause_root()
    if image not in _directories:
        _directories[image] = await pulled(agent, image)
    return _directories[image]


async def image_root(agent: Agent, image: str, target: str, container: str) -> None:
    """`target` is a writable root of `image`, its layers pulled unless the guest has them already."""
    lower = await prepare(agent, image)
    folders = {name: f"{CONTAINERS}/{container}/{name}" for name in ("upper", "work")}
    for path in (*folders.values(), target):
        os.makedirs(path, exist_ok=True)
    options = [f"lowerdir={lower}", f"upperdir={folders['upper']}", f"workdir={folders['work']}"]
    mounts.mount("overlay", target, "overlay", options)


def pause_root(images: str = IMAGES) -> str:
    """The root of a container that only waits: a shell and a script in place of Kubernetes' pause image."""
    root = f"{images}/{PAUSE}"
    if os.path.isdir(root):
        return root
    busybox = next((path for path in _BUSYBOX if os.access(path, os.X_OK)), None)
    if busybox is None:
        raise Internal("make the pause container's root: the guest has no busybox")
    making = f"{root}.part"
    remove_tree(making)
    for folder in ("bin", "dev", "etc", "proc", "sys", "tmp"):
        os.makedirs(f"{making}/{folder}")
    with open(busybox, "rb") as program:
        _write(f"{making}/bin/busybox", program.read())
    for name in ("sh", "sleep"):
        os.symlink("busybox", f"{making}/bin/{name}")
    _write(f"{making}/pause", _PAUSE_SCRIPT)
    os.rename(making, root)
    return root


def _write(path: str, content: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o755), "wb") as file:
        file.write(content)


async def pulled(agent: Agent, image: str) -> str:
    """The directory of the image's files. Internal says why there is none; FailedPrecondition without a source."""
    source = agent.settings.image_source
    if not source:
        raise FailedPrecondition(
            f"pull image {image[:200]!r}: this agent has no source of images (kernel parameter agent.image_source)"
        )
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        _child(write_end, image, source)
    os.close(write_end)
    exited = agent.children.adopt(pid)
    log.info("pulling image", image=image, source=source, pid=pid)
    try:
        answer: str = await agent.loop.within(
            agent.settings.image_pull_timeout_s, _answer(agent, read_end), f"pull image {image[:200]!r}"
        )
    except BaseException:
        if agent.children.is_running(pid):
            os.kill(pid, _SIGKILL)
        raise
    finally:
        os.close(read_end)
    if await exited != 0:
        raise Internal(f"pull image {image[:200]!r} from {source!r}: {answer or 'the puller died'}")
    return answer


async def _answer(agent: Agent, fd: int) -> str:
    """What the child says before it ends: the directory, or the error."""
    os.set_blocking(fd, False)
    data = b""
    while True:
        try:
            chunk = os.read(fd, _MAX_ANSWER_BYTES)
        except BlockingIOError:
            await agent.loop.wait_fd(fd, 1)
            continue
        if not chunk:
            return data[:_MAX_ANSWER_BYTES].decode("utf-8", "replace")
        data += chunk


def _child(write_end: int, image: str, source: str) -> None:
    """Never returns. The parent's loop and descriptors are left alone: they are shared with it."""
    code = 1
    # Copies of the agent's pipes and sockets: their other ends would see no end of file until this process is gone.
    os.dup2(write_end, 3, inheritable=False)
    write_end = 3
    os.closerange(4, 1 << 16)
    try:
        from guest.agent.pull.layers import make_image
        from guest.agent.pull.source import PullError, open_source

        try:
            answer = make_image(open_source(source), image, IMAGES)
            code = 0
        except (PullError, OSError, EOFError, ValueError) as error:
            answer = str(error) or type(error).__name__
        os.write(write_end, answer.encode("utf-8", "replace")[:_MAX_ANSWER_BYTES])
    except BaseException as error:  # nothing of this process may go on in the agent's code
        os.write(write_end, repr(error).encode("utf-8", "replace")[:_MAX_ANSWER_BYTES])
    finally:
        os._exit(code)
