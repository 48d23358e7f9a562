"""Requests to a shim, over the HTTP of its monitor socket."""

import os

import aiohttp

from pyshim.model.errors import FailedPrecondition, NotFound, ShimError, Unavailable

MAX_ANSWER_BYTES = 8 << 20
"""Bytes of one shim's answer."""
_MAX_REASON_CHARS = 1000


async def shim_answer(path: str, target: str, *, within_s: float, method: str = "GET", body: bytes = b"") -> str:
    """The answer of the shim at the socket `path`.

    Raises FailedPrecondition with the text of a refusal, NotFound when the sandbox has ended, Unavailable otherwise.
    """
    try:
        async with (
            aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(path, force_close=True), timeout=aiohttp.ClientTimeout(total=within_s)
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
