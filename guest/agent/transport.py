"""Where hosts connect: the schemes of `agent.server_addr`.

- `vsock://-1:PORT` listens on every context id, `unix://PATH` on a socket: any number of connections.
- `serial:///dev/virtio-ports/NAME`: one byte stream over a virtio-serial port; no udev is needed, the port is found by
  its name in sysfs.
"""

from __future__ import annotations

import _socket
import os
import select

from guest.agent import log
from guest.agent.errors import InvalidArgument
from guest.agent.server import Peer
from guest.agent.text_files import read_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from guest.agent.agent import Agent

_PORTS = "/sys/class/virtio-ports"
_FIND_AGAIN_S = 0.01
_REOPEN_S = 0.2


class Server:
    """Accepts hosts at one address. `peers` are the open connections."""

    def __init__(self, agent: Agent, address: str) -> None:
        self._agent = agent
        self._address = address
        self._looked = 0
        self.peers: list[Peer] = []

    def start(self) -> None:
        """Listening. InvalidArgument names an address of no known form; OSError means that it cannot be had."""
        scheme, separator, rest = self._address.partition("://")
        if separator and scheme == "serial" and rest:
            self._open_port(rest)
        elif separator and scheme in ("vsock", "unix") and rest:
            listener = vsock_listener(rest, self._address) if scheme == "vsock" else _unix_listener(rest)
            listen(self._agent, listener, self._serve)
        else:
            raise InvalidArgument(f"listen on {self._address!r}: not vsock://, serial:// or unix://")

    def is_drained(self) -> bool:
        return all(peer.is_drained() for peer in self.peers)

    def _serve(self, fd: int, keep_open: bool = False) -> None:
        peer = Peer(self._agent.loop, self._agent, fd, keep_open=keep_open, on_end=self.peers.remove)
        self.peers.append(peer)
        peer.start()

    # -- virtio-serial ---------------------------------------------------------------------------------------------

    def _open_port(self, path: str) -> None:
        node = find_port(path)
        try:
            if node is None:
                raise FileNotFoundError(2, "no such virtio port", path)
            fd = os.open(node, os.O_RDWR | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError as error:
            # The driver may still be probing. EBUSY: the last user's close is under way.
            self._looked += 1
            if self._looked == 100:
                log.warning("virtio port is not there yet", path=path, error=error)
            delay = _FIND_AGAIN_S if self._looked < 100 else _REOPEN_S
            self._agent.loop.call_later(delay, lambda: self._open_port(path))
            return
        log.info("listening", address=self._address, node=node)
        self._serve(fd, keep_open=True)


def find_port(path: str) -> str | None:
    """The device node of the virtio-serial port that `path` names, as a node or by the name of the port."""
    if os.path.exists(path):
        return path
    wanted = os.path.basename(path)
    try:
        entries = os.listdir(_PORTS)
    except FileNotFoundError:
        return None
    for entry in entries:
        try:
            name = read_text(f"{_PORTS}/{entry}/name").strip()
        except OSError:
            continue  # unplugged meanwhile, or it has no name
        if name == wanted:
            return f"/dev/{entry}"
    return None


def vsock_listener(rest: str, address: str) -> _socket.socket:
    """A listening vsock socket for `CID:PORT`; -1 is any context id."""
    cid_text, _, port_text = rest.partition(":")
    try:
        cid, port = int(cid_text), int(port_text)
    except ValueError:
        raise InvalidArgument(f"listen on {address!r}: want vsock://CID:PORT") from None
    listener = _socket.socket(_socket.AF_VSOCK, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC | _socket.SOCK_NONBLOCK)
    listener.bind((_socket.VMADDR_CID_ANY if cid < 0 else cid, port))
    return listener


def _unix_listener(path: str) -> _socket.socket:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    listener = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC | _socket.SOCK_NONBLOCK)
    old = os.umask(0o177)
    try:
        listener.bind(path)
    finally:
        os.umask(old)
    return listener


def listen(agent: Agent, listener: _socket.socket, serve: Callable[[int], None]) -> None:
    """`serve(fd)` runs for every connection made to the bound socket `listener`, which lives as long as the agent."""
    listener.listen(128)

    def accept(_events: int) -> None:
        while True:
            try:
                fd, _peer = listener._accept()  # type: ignore[attr-defined]
            except BlockingIOError:
                return
            except OSError as error:
                log.warning("accept failed", error=error)
                return
            os.set_inheritable(fd, False)
            serve(fd)

    agent.loop.watch(listener.fileno(), select.EPOLLIN, accept)
    log.info("listening", address=str(listener.getsockname()))
