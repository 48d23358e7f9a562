"""Requests to a sandbox's shim, over the monitor socket beside its state."""

import asyncio

from pyshim.model.observation import MONITOR_SOCKET
from pyshim.node.cli.sandbox import sandbox_id
from pyshim.node.monitor.shim_client import shim_answer

_TIMEOUT_S = 30.0


def monitor_socket(state_dir: str, sandbox_id: str) -> str:
    return f"{state_dir}/{sandbox_id}/{MONITOR_SOCKET}"


def ask_sandbox(state_dir: str, sandbox: str, method: str, target: str, body: bytes = b"") -> str:
    """The answer of the shim of the sandbox that `sandbox` names. Raises NotFound for none, and as `shim_answer`."""
    return exchange(monitor_socket(state_dir, sandbox_id(sandbox, state_dir)), method, target, body)


def exchange(address: str, method: str, target: str, body: bytes = b"") -> str:
    """The answer of the shim at the socket `address`. Raises as `shim_answer`."""
    return asyncio.run(shim_answer(address, target, method=method, body=body, within_s=_TIMEOUT_S))
