"""From the kernel command line to two processes: the forwarder, and the caller in a network namespace of its own."""

from __future__ import annotations

import os

from guest.agent import log, settings


class Words:
    """What the command line asks of the forwarder.

    `port`: where it listens. `address`: the interface's IPv4 address with its prefix length, empty to leave the
    interface alone. `agent`: the path of the agent's unix socket.
    """

    __slots__ = ("address", "agent", "port")

    def __init__(self, port: int, address: str, agent: str) -> None:
        self.port = port
        self.address = address
        self.agent = agent


def parse(command_line: str) -> Words | None:
    """What is asked; None without a usable `forwarder.port`, or when the agent listens on no unix socket."""
    words = command_line.split()
    asked = dict(word.partition("=")[::2] for word in words)
    port, address = asked.get("forwarder.port", ""), asked.get("forwarder.address", "")
    scheme, _, agent = settings.parse(words).server_addr.partition("://")
    if not port:
        return None
    is_port = port.isascii() and port.isdigit() and 0 < int(port) < 65536
    if not (is_port and scheme == "unix" and agent.startswith("/")):
        log.error("no forwarder: it needs forwarder.port=1-65535 and agent.server_addr=unix:///PATH")
        return None
    return Words(int(port), address, agent)


def fork_forwarder(words: Words) -> None:
    """A child forwards in the namespace that has the interface; the caller is in a new one, with a loopback only."""
    os.makedirs(os.path.dirname(words.agent), exist_ok=True)
    if os.fork() == 0:
        code = 1
        try:
            from guest.forwarder.serve import serve

            serve(words)
        except BaseException as error:  # the child must not go on in the caller's code
            log.error("the forwarder ends, nobody can reach the agent", error=repr(error))
        finally:
            os._exit(code)
    from guest.agent.storage import syscalls

    syscalls.unshare(syscalls.CLONE_NEWNET)
