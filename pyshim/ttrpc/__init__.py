"""ttrpc: the RPC protocol of containerd's shims and of the Kata guest agent.

Read README.md for an example and `connection.py` for the protocol: it is all of it, without I/O. Payloads are opaque
`bytes`; protobuf encodes the two envelope messages of the protocol itself. Calls are unary; a request that
announces a stream is refused as UNIMPLEMENTED.

    framing.py     10-byte header, 4 MiB limit, FrameReader        messages.py  Request and Response envelopes
    status.py      status codes, exceptions                         events.py    reports of the core
    connection.py  ServerConnection, ClientConnection (sans-IO)     link.py      a core on a socket
    handlers.py    handlers and the context of a call               session.py   one connection of a server
    server.py      Server                                           client.py    Client, connected_unix_socket
"""

from .client import Client, connected_unix_socket
from .connection import ClientConnection, ServerConnection
from .handlers import CallContext, Handler, ImmediateHandler, PeerCredentials, UnaryHandler
from .server import Server
from .status import (
    CallTimedOut,
    Code,
    ConnectionClosed,
    LocalProtocolError,
    MessageTooLarge,
    OutcomeUnknown,
    RemoteError,
    RemoteProtocolError,
    TtrpcError,
)

__all__ = [
    "CallContext",
    "CallTimedOut",
    "Client",
    "ClientConnection",
    "Code",
    "ConnectionClosed",
    "Handler",
    "ImmediateHandler",
    "LocalProtocolError",
    "MessageTooLarge",
    "OutcomeUnknown",
    "PeerCredentials",
    "RemoteError",
    "RemoteProtocolError",
    "Server",
    "ServerConnection",
    "TtrpcError",
    "UnaryHandler",
    "connected_unix_socket",
]
