"""Copies a listener's connections to the agent's unix socket and back. One that hangs delays no other.

TLS is OpenSSL on a non-blocking socket that the loop waits for. asyncio's TLS closes a connection after a failed
handshake without the alert that gives the client the reason.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from guest.forwarder.material import Keys

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_CONNECTIONS = 64
_PIECE_BYTES = 256 << 10
# Seconds that a client gets to finish its handshake.
_HANDSHAKE_S = 60.0
# The agent may not listen yet: seconds to wait for it, and between two tries.
_AGENT_WITHIN_S = 150.0
_AGAIN_S = 0.05
# Seconds after a failed accept: memory or descriptors may be free again soon.
_REST_S = 0.5


def server_context(keys: Keys) -> ssl.SSLContext:
    """TLS 1.2 or newer for clients with a certificate of the given authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_REQUIRED
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.load_verify_locations(cadata=keys.client_authority)
    # The library reads keys only from a file: this one has no name and is on no disk.
    with open(os.memfd_create("keys"), "w", encoding="ascii") as file:
        file.write(f"{keys.certificate}\n{keys.key}")
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return context


async def forward(listener: socket.socket, agent: str, context: ssl.SSLContext) -> None:
    """Every connection of `listener` is forwarded to the unix socket `agent`, at most MAX_CONNECTIONS at once."""
    listener.setblocking(False)
    running = 0

    def ended(_task: asyncio.Task[None]) -> None:
        nonlocal running
        running -= 1

    async with asyncio.TaskGroup() as connections:
        while True:
            try:
                connection, address = await asyncio.get_running_loop().sock_accept(listener)
            except OSError as error:
                log.warning("connection not accepted", extra={"error": error})
                await asyncio.sleep(_REST_S)
                continue
            if running >= MAX_CONNECTIONS:
                log.warning("connection refused: too many", extra={"client": address[0]})
                connection.close()
                continue
            running += 1
            work = _serve(connection, agent, context, address[0])
            connections.create_task(work, name=f"forward {address[0]}").add_done_callback(ended)


async def _serve(connection: socket.socket, agent: str, context: ssl.SSLContext, client: str) -> None:
    try:
        await forward_connection(connection, context, lambda: connected_agent(agent))
    except OSError as error:  # of TLS too
        log.info("connection ended", extra={"client": client, "error": error})
    except Exception:  # a bug that one connection meets must not end the others
        log.exception("connection crashed", extra={"client": client})


async def forward_connection(
    connection: socket.socket, context: ssl.SSLContext, connect: Callable[[], Awaitable[socket.socket]]
) -> None:
    """Everything that either side sent before its end is copied, and both are closed.

    `connect` makes the plain side. It is called only after a client's certificate was verified. Raises OSError, also
    ssl.SSLError.
    """
    connection.setblocking(False)
    tls = context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
    with tls:
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                await _retried(tls, tls.do_handshake)
        except TimeoutError:
            raise TimeoutError("finish the TLS handshake: the client is silent") from None
        with await connect() as plain:
            plain.setblocking(False)
            inward = asyncio.create_task(_to_agent(tls, plain))
            outward = asyncio.create_task(_to_client(plain, tls))
            try:
                await asyncio.wait((inward, outward), return_when=asyncio.FIRST_COMPLETED)
                # A side that accepts no more may have sent something before its end: the other task reads it.
                if inward.done() and not inward.result():
                    await outward
                elif outward.done() and not outward.result():
                    await inward
            finally:
                inward.cancel()
                outward.cancel()
                await asyncio.gather(inward, outward, return_exceptions=True)


async def _to_agent(tls: ssl.SSLSocket, plain: socket.socket) -> bool:
    """True once the agent has all that the client sent; False if the agent accepts no more."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            data = await _retried(tls, lambda: tls.recv(_PIECE_BYTES))
        except ConnectionError:
            return True
        if not data:
            return True
        try:
            await loop.sock_sendall(plain, data)
        except ConnectionError:
            return False


async def _to_client(plain: socket.socket, tls: ssl.SSLSocket) -> bool:
    """True once the client has all that the agent sent, and TLS' close; False if the client accepts no more."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            data = await loop.sock_recv(plain, _PIECE_BYTES)
        except ConnectionError:
            data = b""
        try:
            if not data:
                with suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError):  # does not wait for the client's
                    tls.unwrap()
                return True
            view = memoryview(data)
            while view:
                view = view[await _retried(tls, partial(tls.send, view), writes=True) :]
        except OSError:
            return False


async def _retried(tls: ssl.SSLSocket, step: Callable[[], T], *, writes: bool = False) -> T:
    """The result of `step`, which is repeated until the socket lets it read (with `writes`: write).

    Rarely TLS needs the other direction; then `step` is repeated a little later, since the loop has only one waiter for
    each direction of a socket.
    """
    loop = asyncio.get_running_loop()
    while True:
        try:
            return step()
        except ssl.SSLWantReadError:
            is_expected = not writes
        except ssl.SSLWantWriteError:
            is_expected = writes
        if not is_expected:
            await asyncio.sleep(_AGAIN_S)
            continue
        ready = asyncio.Event()
        (loop.add_writer if writes else loop.add_reader)(tls, ready.set)
        try:
            await ready.wait()
        finally:
            (loop.remove_writer if writes else loop.remove_reader)(tls)


async def connected_agent(path: str) -> socket.socket:
    """A connection to the agent, which may not listen yet. Raises OSError after `_AGENT_WITHIN_S`."""
    deadline = asyncio.get_running_loop().time() + _AGENT_WITHIN_S
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(path)
        except OSError:
            sock.close()
            if asyncio.get_running_loop().time() > deadline:
                raise
            await asyncio.sleep(_AGAIN_S)
            continue
        return sock
