"""Streaming methods of a service, one for each direction and one that fails."""

from __future__ import annotations

from pyshim.ttrpc.handlers import CallContext, ServerStream, StreamHandler
from pyshim.ttrpc.status import Code, TtrpcError


async def total(stream: ServerStream, call: CallContext) -> bytes:
    """Client stream: the sum of the numbers received."""
    return b"%d" % sum([int(message) async for message in stream])


async def count(stream: ServerStream, call: CallContext) -> None:
    """Server stream: the numbers below the one received."""
    limit = await stream.recv()
    assert limit is not None
    for number in range(int(limit)):
        await stream.send(b"%d" % number)


async def double(stream: ServerStream, call: CallContext) -> None:
    """Both: every number twice as large."""
    async for message in stream:
        await stream.send(b"%d" % (2 * int(message)))


async def fail(stream: ServerStream, call: CallContext) -> None:
    await stream.send(b"before")
    raise TtrpcError(Code.ABORTED, "stopped")


SERVICES = {
    "demo": {
        "Total": StreamHandler(total, client_streams=True, server_streams=False),
        "Count": StreamHandler(count, client_streams=False, server_streams=True),
        "Double": StreamHandler(double, client_streams=True, server_streams=True),
        "Fail": StreamHandler(fail, client_streams=True, server_streams=True),
    }
}
