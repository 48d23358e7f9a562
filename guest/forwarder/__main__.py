"""`python3 -m guest.forwarder --port N [--address A.B.C.D/N] AGENT`: the agent's unix socket over TCP and TLS."""

from __future__ import annotations

import argparse
import asyncio
import logging
import socket

from guest.agent import log
from guest.forwarder import material
from guest.forwarder.forward import MAX_CONNECTIONS, forward, server_context

_log = logging.getLogger(__name__)


def main() -> None:
    """Forwards until the process is killed. Raises OSError or ValueError when it cannot begin."""
    parser = argparse.ArgumentParser(prog="python3 -m guest.forwarder")
    parser.add_argument("--port", type=int, required=True, help="where it listens, on every address")
    parser.add_argument("--address", default="", help="given to the interface; without it that is left alone")
    parser.add_argument("agent", help="path of the agent's unix socket")
    words = parser.parse_args()
    log.set_up()
    material.mount_disks()
    context = server_context(material.read_keys())
    if words.address:
        material.bring_up(words.address)
    listener = socket.create_server(("", words.port), backlog=MAX_CONNECTIONS)
    _log.info("forwarding", extra={"port": words.port, "agent": words.agent})
    asyncio.run(forward(listener, words.agent, context))


if __name__ == "__main__":
    main()
