"""The program that `finder.py` starts: takes one question, sends one answer, ends."""

import socket

import msgspec

from pyshim.host.python_child import SOCKET_FD, Inbox, send
from pyshim.model.devices import DeviceQuestion, PodResources
from pyshim.model.errors import FailedPrecondition, ShimError


def main() -> None:
    """The answer has been sent: `{"ok": ...}`, or `{"error": text, "kind": name}` for a ShimError."""
    with socket.socket(fileno=SOCKET_FD) as connection:
        if (message := Inbox().wait(connection)) is None:
            return
        question = msgspec.convert(message[0], DeviceQuestion)
        # After the question was read, so that the traceback of a broken installation is written to the log.
        from pyshim.resources.devices.host.find import find_devices

        try:
            answer = {"ok": msgspec.to_builtins(find_devices(question, ask=_ask))}
        except ShimError as error:
            answer = {"error": str(error), "kind": type(error).__name__}
        send(connection, answer)


def _ask(socket_path: str, name: str, namespace: str) -> PodResources:
    try:
        from pyshim.resources.devices.host.kubelet import pod_resources
    except ImportError as error:
        raise FailedPrecondition(f"ask kubelet at '{socket_path}': {error} (hint: install pyshim[devices])") from error
    return pod_resources(socket_path, name, namespace)
