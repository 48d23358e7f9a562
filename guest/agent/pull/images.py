"""The images of this guest as directories, and the containers' roots made of them."""

from __future__ import annotations

import logging
import os

from guest.agent import mounts
from guest.agent.children import PYTHON_ENVIRONMENT, Children, python_program
from guest.agent.errors import FailedPrecondition, Internal
from guest.agent.files import remove_tree

log = logging.getLogger(__name__)

IMAGES = "/run/kata-containers/images"
CONTAINERS = "/run/kata-containers"
PAUSE = "pause"
"""The image of a pod's first container, which only waits. It is made here, never pulled."""
_BUSYBOX = ("/bin/busybox", "/usr/bin/busybox")
_PAUSE_SCRIPT = "#!/bin/sh\ntrap 'exit 0' INT TERM\nwhile :; do sleep 2147483647 & wait $! || sleep 1; done\n"
# Of the puller's complaint in an error.
_MAX_ERROR_CHARS = 4096


class Images:
    """The images pulled so far. A name means the same image until the guest ends."""

    def __init__(self, *, children: Children, source: str, timeout_s: float) -> None:
        """`source` is the setting `agent.image_source`, "" for none."""
        self._children = children
        self._source = source
        self._timeout_s = timeout_s
        self._directories: dict[str, str] = {}

    async def prepare(self, image: str) -> str:
        """The directory of the image's files, pulled unless the guest has them.

        Raises Internal with the reason, DeadlineExceeded if it takes too long, FailedPrecondition without a source.
        """
        if image == PAUSE:
            return pause_root()
        if image not in self._directories:
            self._directories[image] = await self._pull(image)
        return self._directories[image]

    async def make_root(self, image: str, target: str, container: str) -> None:
        """`target` is a writable root of `image`, its layers pulled unless the guest has them already."""
        lower = await self.prepare(image)
        upper, work = (f"{CONTAINERS}/{container}/{name}" for name in ("upper", "work"))
        for path in (upper, work, target):
            os.makedirs(path, exist_ok=True)
        mounts.mount("overlay", target, "overlay", [f"lowerdir={lower}", f"upperdir={upper}", f"workdir={work}"])

    async def _pull(self, image: str) -> str:
        doing = f"pull image {image[:200]!r}"
        if not self._source:
            raise FailedPrecondition(
                f"{doing}: this agent has no source of images (kernel parameter agent.image_source)"
            )
        log.info("pulling image", extra={"image": image, "source": self._source})
        ended = await self._children.run(
            python_program("guest.agent.pull", self._source, image, IMAGES),
            environment=PYTHON_ENVIRONMENT,
            timeout_s=self._timeout_s,
            doing=doing,
        )
        if ended.code != 0:
            cause = ended.complaint[-_MAX_ERROR_CHARS:] or f"the puller exited {ended.code}"
            raise Internal(f"{doing} from {self._source!r}: {cause}")
        return ended.stdout.decode()


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
    with open(busybox, "rb") as source, open(f"{making}/bin/busybox", "wb") as copy:
        copy.write(source.read())
    for name in ("sh", "sleep"):
        os.symlink("busybox", f"{making}/bin/{name}")
    with open(f"{making}/pause", "w", encoding="ascii") as script:
        script.write(_PAUSE_SCRIPT)
    for program in ("bin/busybox", "pause"):
        os.chmod(f"{making}/{program}", 0o755)
    os.rename(making, root)
    return root
