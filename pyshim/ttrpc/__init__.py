"""ttrpc: the small RPC protocol of containerd shims and of the Kata guest agent, complete, on the stdlib alone.

What lives here: framing, the protocol core for both roles, an asyncio server and an asyncio client. Payloads are
opaque `bytes`: which messages they hold is the caller's business, so nothing here knows protobuf beyond the two
envelope messages of the protocol itself. Read `connection.py` first: it is the whole protocol without any I/O.

    framing.py     10-byte header, 4 MiB limit, FrameReader        messages.py  Request and Response envelopes
    status.py      status codes, exceptions                         events.py    what the core reports
    connection.py  ServerConnection, ClientConnection (sans-IO)     link.py      a core on a socket or streams
    handlers.py    what a service is made of                        inbox.py     received messages of one stream
    server.py      Server                                           client.py    Client
    unix.py        connected_unix_socket

A server:

    async def get(payload: bytes, call: CallContext) -> bytes: ...
    async def watch(stream: ServerStream, call: CallContext) -> None:
        async for message in stream:
            await stream.send(message)

    server = Server(services={"demo.Store": {
        "Get": get,
        "Watch": StreamHandler(watch, client_streams=True, server_streams=True),
    }})
    await server.serve(listening_socket)        # until `await server.shutdown(grace_s=5)`

A client:

    client = await Client.connect_socket(await connected_unix_socket("/run/demo.sock"))
    reply = await client.call("demo.Store", "Get", request, timeout_s=10)
    async with client.stream("demo.Store", "Watch", client_streams=True, server_streams=True) as stream:
        await stream.send(b"...")
        await stream.close_send()
        async for message in stream: ...

Importing this package loads nothing: names are resolved on first use, and framing, messages, status, events and
connection need no asyncio, so that a program which boots under emulation can drive the core with `selectors` alone.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .client import Client as Client
    from .client import ClientStream as ClientStream
    from .connection import ClientConnection as ClientConnection
    from .connection import ServerConnection as ServerConnection
    from .handlers import CallContext as CallContext
    from .handlers import Handler as Handler
    from .handlers import ImmediateHandler as ImmediateHandler
    from .handlers import PeerCredentials as PeerCredentials
    from .handlers import ServerStream as ServerStream
    from .handlers import StreamHandler as StreamHandler
    from .handlers import UnaryHandler as UnaryHandler
    from .server import Server as Server
    from .status import Code as Code
    from .status import ConnectionClosed as ConnectionClosed
    from .status import DeadlineExceeded as DeadlineExceeded
    from .status import LocalProtocolError as LocalProtocolError
    from .status import MessageTooLarge as MessageTooLarge
    from .status import OutcomeUnknown as OutcomeUnknown
    from .status import RemoteError as RemoteError
    from .status import RemoteProtocolError as RemoteProtocolError
    from .status import TtrpcError as TtrpcError
    from .unix import connected_unix_socket as connected_unix_socket

_HOME = {
    "CallContext": "handlers",
    "Client": "client",
    "ClientConnection": "connection",
    "ClientStream": "client",
    "Code": "status",
    "ConnectionClosed": "status",
    "DeadlineExceeded": "status",
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
    "ServerStream": "handlers",
    "StreamHandler": "handlers",
    "TtrpcError": "status",
    "UnaryHandler": "handlers",
    "connected_unix_socket": "unix",
}


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = __import__(f"{__name__}.{home}", fromlist=[name])
    value: object = getattr(module, name)
    globals()[name] = value
    return value
