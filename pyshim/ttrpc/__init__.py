"""ttrpc: the RPC protocol of containerd's shims and of the Kata guest agent.

Read README.md for an example and `connection.py` for the protocol: it is all of it, without I/O. Payloads are opaque
`bytes`; protobuf encodes the two envelope messages of the protocol itself. Calls are unary; a request that
announces a stream is refused as UNIMPLEMENTED.

    framing.py     10-byte header, 4 MiB limit, FrameReader        messages.py  Request and Response envelopes
    status.py      status codes, exceptions                         link.py      a core on a socket
    connection.py  ServerConnection, ClientConnection (sans-IO) and the events that they report
    session.py     handlers, the context of a call, and one connection of a server
    server.py      Server                                           client.py    Client, connected_unix_socket
"""

from .client import Client, connected_unix_socket
from .connection import ClientConnection, ServerConnection
from .server import Server
from .session import CallContext, Handler, ImmediateHandler, PeerCredentials, UnaryHandler
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
