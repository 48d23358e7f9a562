"""The forwarder's process: a listener, and a process for each connection, so that one that hangs hangs alone."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import time

from guest.agent import log
from guest.forwarder import material
from guest.forwarder.pump import Pump

TYPE_CHECKING = False
if TYPE_CHECKING:
    from guest.forwarder.fork import Words

MAX_CONNECTIONS = 64
_AGENT_WITHIN_S = 150.0
_AGAIN_S = 0.05
_REST_S = 0.5


def serve(words: Words) -> None:
    """Forwards until the process is killed. Raises OSError or ValueError when it cannot begin."""
    material.mount_disks()
    context = server_context(material.read_keys())
    if words.address:
        material.bring_up(words.address)
    listener = socket.create_server(("", words.port), backlog=MAX_CONNECTIONS)
    log.info("forwarding", port=words.port, agent=words.agent)
    forward(listener, words.agent, context)


def server_context(keys: material.Keys) -> ssl.SSLContext:
    """TLS 1.2 or newer for clients with a certificate of the given authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=keys.client_authority)
    # The library reads them from a file only: this one has no name, and no room on any disk.
    fd = os.memfd_create("keys")
    try:
        with open(fd, "w", encoding="ascii", closefd=False) as file:
            file.write(f"{keys.certificate}\n{keys.key}")
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
    return context


def forward(listener: socket.socket, agent: str, context: ssl.SSLContext) -> None:
    """Every connection of `listener` is forwarded to the unix socket `agent`, each by a process of its own."""
    running: set[int] = set()
    while True:
        try:
            connection, address = listener.accept()
        except OSError as error:
            _rest("connection not accepted", error)
            continue
        running -= {pid for pid in running if os.waitpid(pid, os.WNOHANG)[0]}
        if len(running) >= MAX_CONNECTIONS:
            log.warning("connection refused: too many", client=address[0])
            connection.close()
            continue
        try:
            pid = os.fork()
        except OSError as error:
            connection.close()
            _rest("connection refused", error)
            continue
        if pid == 0:
            listener.close()
            _one(connection, agent, context, address[0])
        running.add(pid)
        connection.close()


def _rest(what: str, error: OSError) -> None:
    """A guest that has no process, memory or file left may have one again soon."""
    log.warning(what, error=error)
    time.sleep(_REST_S)


def _one(connection: socket.socket, agent: str, context: ssl.SSLContext, client: str) -> None:
    """Never returns."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        Pump(connection, context).run(lambda: connected_agent(agent))
    except (OSError, EOFError) as error:  # of TLS too
        log.info("connection ended", client=client, error=error)
    finally:
        os._exit(0)


def connected_agent(path: str, within_s: float = _AGENT_WITHIN_S) -> socket.socket:
    """A connection to the agent, which may not listen yet."""
    deadline = time.monotonic() + within_s
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(path)
        except OSError:
            sock.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(_AGAIN_S)
            continue
        return sock
