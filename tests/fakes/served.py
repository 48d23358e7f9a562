"""A ttrpc server of given services, and a client of it."""

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from pyshim.ttrpc.client import Client
from pyshim.ttrpc.server import Server
from pyshim.ttrpc.session import Handler


@asynccontextmanager
async def served(services: Mapping[str, Mapping[str, Handler]], **options: Any) -> AsyncIterator[tuple[Server, Client]]:
    """A server and a client of it; both are gone afterwards."""
    server = Server(services=services, **options)
    ours, theirs = socket.socketpair()
    serving = asyncio.create_task(server.serve_connection(theirs))
    client = Client(ours)
    try:
        yield server, client
    finally:
        client.close()
        await server.shutdown(0)
        await serving
