"""The child's side: one question on descriptor 3, one answer, the end."""

import json
import os

from pyshim.model.devices import as_json, question_from_json
from pyshim.model.errors import ShimError

SOCKET_FD = 3


def main() -> None:
    """The answer has been written: `{"ok": ...}`, or `{"error": text, "code": number}` for a ShimError."""
    with os.fdopen(SOCKET_FD, "rb", closefd=False) as stream:
        question = question_from_json(json.loads(stream.readline()))
    # Here, so that a broken installation of gRPC is this child's traceback and nobody else's.
    from pyshim.devices.find import find_devices

    try:
        answer = {"ok": as_json(find_devices(question))}
    except ShimError as error:
        answer = {"error": str(error), "kind": type(error).__name__}
    with os.fdopen(SOCKET_FD, "wb") as stream:
        stream.write(json.dumps(answer).encode())
