"""Requests to a sandbox's shim, over the monitor socket beside its state."""

import http.client
import socket
from contextlib import suppress

from pyshim.host.os_errors import describe_os_error
from pyshim.model.errors import FailedPrecondition, Unavailable
from pyshim.model.observation import MONITOR_SOCKET
from pyshim.node.cli.sandbox import sandbox_id

_TIMEOUT_S = 30.0
_MAX_REPLY_BYTES = 64 * 1024 * 1024
"""More than any answer has. A guest decides the size of some answers."""

_MAX_REASON_CHARACTERS = 1000


def monitor_socket(state_dir: str, sandbox_id: str) -> str:
    return f"{state_dir}/{sandbox_id}/{MONITOR_SOCKET}"


def ask_sandbox(state_dir: str, sandbox: str, method: str, target: str, body: bytes = b"") -> str:
    """The answer of the shim of the sandbox that `sandbox` names. Raises NotFound for none, and as `exchange`."""
    return exchange(monitor_socket(state_dir, sandbox_id(sandbox, state_dir)), method, target, body)


def exchange(address: str, method: str, target: str, body: bytes = b"") -> str:
    """The text of the shim's answer. Raises Unavailable without one; FailedPrecondition with the text of a refusal."""
    connection = _UnixConnection(address)
    try:
        with suppress(BrokenPipeError):  # a shim with too many clients answers before it has read the request
            connection.request(method, target, body)
        reply = connection.getresponse()
        text = reply.read(_MAX_REPLY_BYTES).decode("utf-8", "replace")
    except (OSError, http.client.HTTPException) as error:
        text = describe_os_error(error) if isinstance(error, OSError) and error.errno else str(error)
        raise Unavailable(f"ask {address!r}: {text or type(error).__name__}") from error
    finally:
        connection.close()
    if reply.status != http.client.OK:
        text = " ".join(text[:_MAX_REASON_CHARACTERS].split())
        raise FailedPrecondition(f"ask {address!r}: {text or reply.reason}")
    return text


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, address: str) -> None:
        super().__init__("localhost", timeout=_TIMEOUT_S)
        self._address = address

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(_TIMEOUT_S)
        self.sock.connect(self._address)
