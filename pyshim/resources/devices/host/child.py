"""The program that `finder.py` starts: reads one question on descriptor 3, writes one answer, ends."""

import json
import os

import msgspec

from pyshim.model.devices import DeviceQuestion, PodResources
from pyshim.model.errors import FailedPrecondition, ShimError

SOCKET_FD = 3


def main() -> None:
    """The answer has been written: `{"ok": ...}`, or `{"error": text, "kind": name}` for a ShimError."""
    with os.fdopen(SOCKET_FD, "rb", closefd=False) as stream:
        question = msgspec.convert(json.loads(stream.readline()), DeviceQuestion)
    # After the question was read, so that the traceback of a broken installation is written to the log.
    from pyshim.resources.devices.host.find import find_devices

    try:
        answer = {"ok": msgspec.to_builtins(find_devices(question, ask=_ask))}
    except ShimError as error:
        answer = {"error": str(error), "kind": type(error).__name__}
    with os.fdopen(SOCKET_FD, "wb") as stream:
        stream.write(json.dumps(answer).encode())


def _ask(socket_path: str, name: str, namespace: str) -> PodResources:
    try:
        from pyshim.resources.devices.host.kubelet import pod_resources
    except ImportError as error:
        raise FailedPrecondition(f"ask kubelet at '{socket_path}': {error} (hint: install pyshim[devices])") from error
    return pod_resources(socket_path, name, namespace)
