"""The program that `finder.py` starts: reads one question on descriptor 3, writes one answer, ends."""

import json
import os

import msgspec

from pyshim.model.devices import DeviceQuestion
from pyshim.model.errors import ShimError

SOCKET_FD = 3


def main() -> None:
    """The answer has been written: `{"ok": ...}`, or `{"error": text, "kind": name}` for a ShimError."""
    with os.fdopen(SOCKET_FD, "rb", closefd=False) as stream:
        question = msgspec.convert(json.loads(stream.readline()), DeviceQuestion)
    # After the question was read, so that the traceback of a broken installation of gRPC is written to the log.
    from pyshim.resources.devices.host.find import find_devices
    from pyshim.resources.devices.host.kubelet import pod_resources

    try:
        answer = {"ok": msgspec.to_builtins(find_devices(question, ask=pod_resources))}
    except ShimError as error:
        answer = {"error": str(error), "kind": type(error).__name__}
    with os.fdopen(SOCKET_FD, "wb") as stream:
        stream.write(json.dumps(answer).encode())
