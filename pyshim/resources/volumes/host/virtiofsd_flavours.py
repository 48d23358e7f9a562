"""The flavour of a virtiofsd binary, Rust's or QEMU's C one: each file of a node is asked once.

Every pod has a new shim, which would ask again, and that takes as long as starting virtiofsd. So the answers are stored
below /run, by the file's identity: device, inode, size, times of change. A changed file has another identity.
"""

import json
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress

from pyshim.host.files import replace_file
from pyshim.host.processes.children import Children
from pyshim.host.processes.launch import describe_os_error
from pyshim.model.errors import FailedPrecondition, Internal
from pyshim.model.host_facts import VirtiofsdFlavour

log = logging.getLogger(__name__)

ANSWERS = "/run/pyshim/virtiofsd-flavours"
"""A line for each binary, the last asked last: its identity, its flavour."""
_MAX_ANSWERS = 16
_PROBE_TIMEOUT_S = 25.0
"""For a program that only prints: less than CHANGE_S, the caller's, which names less."""
_ENV = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
_SETTLED_NS = 2_000_000_000
"""A file changed less than this ago may change again within one tick of its clock, so its answer is not stored."""


class VirtiofsdFailed(Internal):
    """virtiofsd could not be asked or started."""


class VirtiofsdFlavours:
    """The flavour of each binary; its answer is stored at `answers` for later shims."""

    def __init__(
        self, children: Children, *, answers: str = ANSWERS, clock_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self._children = children
        self._answers = answers
        self._clock_ns = clock_ns

    async def of(self, binary: str) -> VirtiofsdFlavour:
        """Raises FailedPrecondition for a missing program, VirtiofsdFailed when its answer fits neither flavour."""
        try:
            status = os.stat(binary)
        except OSError as error:
            raise FailedPrecondition(f"find virtiofsd {binary!r}: {describe_os_error(error)}") from error
        identity = (
            f"{status.st_dev:x}-{status.st_ino:x}-{status.st_size:x}-{status.st_mtime_ns:x}-{status.st_ctime_ns:x}"
        )
        stored = self._stored().get(identity)
        if stored is not None and os.access(binary, os.X_OK):
            return stored
        flavour = await self._ask(binary)
        if self._clock_ns() - max(status.st_mtime_ns, status.st_ctime_ns) > _SETTLED_NS:
            self._store(identity, flavour)
        return flavour

    def _stored(self) -> dict[str, VirtiofsdFlavour]:
        """By identity; nothing when others than us could have written it."""
        found: dict[str, VirtiofsdFlavour] = {}
        with suppress(OSError, UnicodeDecodeError):
            fd = os.open(self._answers, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            with open(fd, encoding="ascii") as file:
                status = os.fstat(fd)
                if status.st_uid != os.geteuid() or status.st_mode & 0o022:
                    return found
                for line in file.read(_MAX_ANSWERS * 256).splitlines():
                    identity, _, flavour = line.partition(" ")
                    if flavour in VirtiofsdFlavour._value2member_map_:
                        found[identity] = VirtiofsdFlavour(flavour)
        return found

    def _store(self, identity: str, flavour: VirtiofsdFlavour) -> None:
        """Best effort: of two shims that store an answer at once, one may be lost and asked for again."""
        answers = {**self._stored(), identity: flavour}
        lines = [f"{each} {answer}\n" for each, answer in answers.items()][-_MAX_ANSWERS:]
        text = "".join(lines).encode("ascii")
        try:
            os.makedirs(os.path.dirname(self._answers), mode=0o700, exist_ok=True)
            replace_file(self._answers, text, mode=0o600, durable=False, many_writers=True)
        except OSError as error:
            log.warning("flavour not stored", extra={"file": self._answers, "error": str(error)})

    async def _ask(self, binary: str) -> VirtiofsdFlavour:
        asked = [binary, "--print-capabilities"]
        ended, output = await self._children.output(asked, env=_ENV, timeout_s=_PROBE_TIMEOUT_S)
        flavour = flavour_from_capabilities(output) if ended.code == 0 and not ended.signal else None
        if flavour is None:
            _, output = await self._children.output([binary, "-V"], env=_ENV, timeout_s=_PROBE_TIMEOUT_S)
            flavour = flavour_from_version(output)
        if flavour is None:
            raise VirtiofsdFailed(f"probe virtiofsd {binary!r}: --print-capabilities {ended}, -V is not understood")
        log.debug("virtiofsd probed", extra={"binary": binary, "flavour": str(flavour)})
        return flavour


def flavour_from_capabilities(output: bytes) -> VirtiofsdFlavour | None:
    """Both print JSON of type fs; only the Rust one lists features, `separate-options` among them."""
    try:
        answer = json.loads(output)
    except ValueError:
        return None
    if not isinstance(answer, dict) or answer.get("type") != "fs":
        return None
    features = answer.get("features")
    if features is None:
        return VirtiofsdFlavour.C
    return VirtiofsdFlavour.RUST if isinstance(features, list) and "separate-options" in features else None


def flavour_from_version(output: bytes) -> VirtiofsdFlavour | None:
    text = output.decode("utf-8", "replace")
    if "using FUSE kernel interface" in text:
        return VirtiofsdFlavour.C
    return VirtiofsdFlavour.RUST if text.startswith("virtiofsd 1.") else None
