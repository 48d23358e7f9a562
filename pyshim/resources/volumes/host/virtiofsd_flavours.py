"""The flavour of a virtiofsd binary, Rust's or QEMU's C one: each file of a node is asked once.

Every pod has a new shim, which would ask again, and that takes as long as starting virtiofsd. Answers are stored.
"""

import logging
import os

from pyshim.host.file_answers import FileAnswers
from pyshim.host.os_errors import os_errors
from pyshim.host.processes.children import Children
from pyshim.model.decoding import json_value
from pyshim.model.errors import Internal
from pyshim.model.host_facts import VirtiofsdFlavour

log = logging.getLogger(__name__)

ANSWERS = "/run/pyshim/virtiofsd"
_PROBE_TIMEOUT_S = 25.0
"""For a program that only prints: less than CHANGE_S, the caller's, which names less."""


class VirtiofsdFlavours:
    """The flavour of each binary; it is stored in `answers` for later shims."""

    def __init__(self, children: Children, answers: FileAnswers | None = None) -> None:
        self._children = children
        self._answers = answers or FileAnswers(ANSWERS)

    async def of(self, binary: str) -> VirtiofsdFlavour:
        """Raises FailedPrecondition for a missing program, Internal when its answer fits neither flavour."""
        with os_errors(f"find virtiofsd {binary!r}"):
            status = os.stat(binary)
        stored = self._answers.stored(status)
        if stored in VirtiofsdFlavour._value2member_map_ and os.access(binary, os.X_OK):
            return VirtiofsdFlavour(stored)
        flavour = await self._ask(binary)
        self._answers.store(status, flavour)
        return flavour

    async def _ask(self, binary: str) -> VirtiofsdFlavour:
        asked = [binary, "--print-capabilities"]
        ended, output = await self._children.output(asked, timeout_s=_PROBE_TIMEOUT_S)
        flavour = flavour_from_capabilities(output) if ended.code == 0 and not ended.signal else None
        if flavour is None:
            _, output = await self._children.output([binary, "-V"], timeout_s=_PROBE_TIMEOUT_S)
            flavour = flavour_from_version(output)
        if flavour is None:
            raise Internal(f"probe virtiofsd {binary!r}: --print-capabilities {ended}, -V is not understood")
        log.debug("virtiofsd probed", extra={"binary": binary, "flavour": str(flavour)})
        return flavour


def flavour_from_capabilities(output: bytes) -> VirtiofsdFlavour | None:
    """Both print JSON of type fs; only the Rust one lists features, `separate-options` among them."""
    try:
        answer = json_value(output, ValueError)
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
