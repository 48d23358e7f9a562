"""Asks the node's NRI plugin for the CPUs and NUMA nodes of a VM."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from pyshim.model.decoding import from_json
from pyshim.model.errors import FailedPrecondition, NotFound, Unavailable
from pyshim.model.sizing import PLACEMENT_METHOD, PLACEMENT_SERVICE, Placement, PlacementRequest
from pyshim.ttrpc import Client, RemoteError, TtrpcError, connected_unix_socket

AskPlacement = Callable[[str, PlacementRequest], Awaitable[Placement]]
"""The placement that the plugin at a socket's path gives a VM. Raises NotFound where the node has no plugin,
Unavailable for one that does not answer, FailedPrecondition when it has no placement."""
ANSWER_S = 2.0
"""Seconds a boot waits for the answer; the plugin computes it in milliseconds."""
_MAX_REPLY_BYTES = 256 << 10
"""Enough for two lists of all CPUs that a kernel can have."""


async def ask_for_placement(path: str, request: PlacementRequest) -> Placement:
    """See `AskPlacement`."""
    try:
        async with asyncio.timeout(ANSWER_S):
            client = Client(await connected_unix_socket(path))
            async with client:
                reply = await client.call(
                    PLACEMENT_SERVICE,
                    PLACEMENT_METHOD,
                    msgspec.json.encode(request),
                    timeout_s=None,
                    max_reply_bytes=_MAX_REPLY_BYTES,
                )
        return from_json(reply, Placement, lambda problem: Unavailable(f"ask '{path}' for a placement: {problem}"))
    except TimeoutError as error:
        raise Unavailable(f"ask '{path}' for a placement: no answer within {ANSWER_S:g} s") from error
    except RemoteError as error:
        raise FailedPrecondition(f"ask '{path}' for a placement: {error}") from error
    except TtrpcError as error:
        raise Unavailable(f"ask '{path}' for a placement: {error}") from error
    except FileNotFoundError as error:
        raise NotFound(f"ask '{path}' for a placement: no plugin runs") from error
    except OSError as error:
        raise Unavailable(f"ask '{path}' for a placement: {error.strerror or error}") from error
