"""ttrpc: the small RPC protocol of containerd shims and of the Kata guest agent, on the stdlib alone.

What lives here: framing, the protocol core for both roles, an asyncio server and an asyncio client. Payloads are
opaque `bytes`: which messages they hold is the caller's business, so nothing here knows protobuf beyond the two
envelope messages of the protocol itself. Calls are unary; a request that announces a stream is refused as
UNIMPLEMENTED. Read `connection.py` first: it is the whole protocol without any I/O.

    framing.py     10-byte header, 4 MiB limit, FrameReader        messages.py  Request and Response envelopes
    status.py      status codes, exceptions                         events.py    what the core reports
    connection.py  ServerConnection, ClientConnection (sans-IO)     link.py      a core on a socket
    handlers.py    what a service is made of                        session.py   one connection of a server
    server.py      Server                                           client.py    Client, connected_unix_socket

A server:

    async def get(payload: bytes, call: CallContext) -> bytes: ...

    server = Server(services={"demo.Store": {"Get": get}})
    await server.serve(listening_socket)        # until `await server.shutdown(grace_s=5)`

A client:

    client = await Client.connect_socket(await connected_unix_socket("/run/demo.sock"))
    reply = await client.call("demo.Store", "Get", request, timeout_s=10)

Importing this package loads none of its modules: names are resolved on first use, so that `delete`, which uses the core
alone, does not load asyncio.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .client import Client as Client
    from .client import connected_unix_socket as connected_unix_socket
    from .connection import ClientConnection as ClientConnection
    from .connection import ServerConnection as ServerConnection
    from .handlers import CallContext as CallContext
    from .handlers import Handler as Handler
    from .handlers import ImmediateHandler as ImmediateHandler
    from .handlers import PeerCredentials as PeerCredentials
    from .handlers import UnaryHandler as UnaryHandler
    from .server import Server as Server
    from .status import CallTimedOut as CallTimedOut
    from .status import Code as Code
    from .status import ConnectionClosed as ConnectionClosed
    from .status import LocalProtocolError as LocalProtocolError
    from .status import MessageTooLarge as MessageTooLarge
    from .status import OutcomeUnknown as OutcomeUnknown
    from .status import RemoteError as RemoteError
    from .status import RemoteProtocolError as RemoteProtocolError
    from .status import TtrpcError as TtrpcError

_HOME = {
    "CallContext": "handlers",
    "CallTimedOut": "status",
    "Client": "client",
    "ClientConnection": "connection",
    "Code": "status",
    "ConnectionClosed": "status",
    "Handler": "handlers",
    "ImmediateHandler": "handlers",
    "LocalProtocolError": "status",
    "MessageTooLarge": "status",
    "OutcomeUnknown": "status",
    "PeerCredentials": "handlers",
    "RemoteError": "status",
    "RemoteProtocolError": "status",
    "Server": "server",
    "ServerConnection": "connection",
    "TtrpcError": "status",
    "UnaryHandler": "handlers",
    "connected_unix_socket": "client",
}


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = __import__(f"{__name__}.{home}", fromlist=[name])
    value: object = getattr(module, name)
    globals()[name] = value
    return value
