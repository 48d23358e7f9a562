"""The Kubernetes names of this node's sandboxes, by one request to each shim."""

import asyncio
import logging
from collections.abc import Mapping

import msgspec

from pyshim.model.errors import FailedPrecondition, ShimError
from pyshim.model.oci import PodName
from pyshim.node.monitor.shim_client import shim_answer

log = logging.getLogger(__name__)

TIMEOUT_S = 2.0
"""Seconds for one answer. Without an answer the sandbox's metrics have no names."""
NO_NAME = PodName()


class Names:
    """Remembers names. Only sockets in METRICS_DIRECTORY answer with one; Kata's shims do not."""

    def __init__(self) -> None:
        self._found: dict[str, PodName] = {}

    async def of(self, sockets: Mapping[str, str]) -> dict[str, PodName]:
        """By sandbox id; NO_NAME for a sandbox outside Kubernetes, and while its shim does not answer."""
        missing = [each for each in sockets if each not in self._found]
        answers = await asyncio.gather(*(_asked(sockets[each]) for each in missing))
        self._found = {each: name for each, name in self._found.items() if each in sockets}
        self._found |= {each: name for each, name in zip(missing, answers, strict=True) if name is not None}
        return {each: self._found.get(each, NO_NAME) for each in sockets}


async def _asked(path: str) -> PodName | None:
    try:
        return msgspec.json.decode(await shim_answer(path, "/pod", within_s=TIMEOUT_S), type=PodName)
    except FailedPrecondition:
        return NO_NAME  # a shim without this path will not have it later
    except ShimError:
        return None
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        log.debug("no name of a pod", extra={"socket": path, "error": str(error)})
        return NO_NAME
