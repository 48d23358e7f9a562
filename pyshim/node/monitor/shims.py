"""The shims of this node: found by their sockets, asked over HTTP, and the Kubernetes names of their sandboxes."""

import asyncio
import logging
import os
from collections.abc import Mapping
from contextlib import suppress

import aiohttp

from pyshim.model.decoding import damaged, from_json
from pyshim.model.errors import FailedPrecondition, InvalidArgument, NotFound, ShimError, Unavailable
from pyshim.model.observation import MONITOR_SOCKET
from pyshim.model.oci import PodName

log = logging.getLogger(__name__)
MAX_ANSWER_BYTES = 8 << 20
"""Bytes of one shim's answer."""
_MAX_REASON_CHARS = 1000
NAME_S = 2.0
"""Seconds for one name. Without an answer the sandbox's metrics have no names."""
NO_NAME = PodName()


def sockets_in(metrics_directory: str, roots: tuple[str, ...]) -> dict[str, str]:
    """By sandbox id, the socket to ask: the one in the directory of metrics, else Kata's in the sandbox's state
    directory.

    Directories that do not exist, or that this user cannot read, count as empty.
    """
    found: dict[str, str] = {}
    for root in roots:
        with suppress(OSError), os.scandir(root) as entries:
            for entry in entries:
                path = f"{entry.path}/{MONITOR_SOCKET}"
                if entry.name not in found and os.path.exists(path):
                    found[entry.name] = path
    with suppress(OSError), os.scandir(metrics_directory) as entries:
        found |= {entry.name: entry.path for entry in entries}
    return dict(sorted(found.items()))


async def shim_answer(path: str, target: str, *, within_s: float, method: str = "GET", body: bytes = b"") -> str:
    """The answer of the shim at the socket `path`.

    Raises FailedPrecondition with the text of a refusal, NotFound when the sandbox has ended, Unavailable otherwise.
    """
    try:
        async with (
            aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(path, force_close=True),
                timeout=aiohttp.ClientTimeout(total=within_s),
                auto_decompress=False,
            ) as session,
            session.request(method, f"http://shim{target}", data=body or None, allow_redirects=False) as reply,
        ):
            content = bytearray()
            async for piece in reply.content.iter_any():
                content += piece
                if len(content) > MAX_ANSWER_BYTES:
                    raise Unavailable(f"ask '{path}': its answer has more than {MAX_ANSWER_BYTES} bytes")
    except TimeoutError as error:
        raise Unavailable(f"ask '{path}': no answer within {within_s:g} s") from error
    except (aiohttp.ClientError, OSError) as error:
        raise _lost(path, getattr(error, "strerror", None) or str(error)) from error
    text = content.decode(errors="replace")
    if reply.status != 200:
        reason = " ".join(text[:_MAX_REASON_CHARS].split())
        raise FailedPrecondition(f"ask '{path}': {reason or reply.reason}")
    return text


def _lost(path: str, problem: str) -> ShimError:
    """A shim that ends removes its socket."""
    return (Unavailable if os.path.exists(path) else NotFound)(f"ask '{path}': {problem}")


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
        return from_json(await shim_answer(path, "/pod", within_s=NAME_S), PodName, damaged(path))
    except FailedPrecondition:
        return NO_NAME  # a shim without this path will not have it later
    except InvalidArgument as error:
        log.debug("no name of a pod", extra={"socket": path, "error": str(error)})
        return NO_NAME
    except ShimError:
        return None
